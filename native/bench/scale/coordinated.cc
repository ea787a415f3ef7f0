// Runs the real coordinator (control/coordinator.h), to which every rank announces its collectives.
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "control/coordinator.h"
#include "scale/simulations.h"

namespace scale {
namespace {

// Counts the messages of rank 0, and measures its work.
class Coordinated {
 public:
  explicit Coordinated(const World& world) : size_(world.size) {
    Must(ddl::RankLocations::Exchange(world.transports[0], &locations_));
    coordinator_ = std::make_unique<ddl::Coordinator>(locations_, 30, 300);
  }

  // All ranks announce these, and receive the decisions.
  void Run(const std::vector<ddl::Announcement>& all) {
    messages_ = bytes_ = 0;
    cpu_ = 0;
    for (const ddl::Announcement& mine : all) {
      const uint32_t id = ids_[mine.name];
      const std::string announced = id != 0 ? ddl::EncodeKnown(id, mine.step) : ddl::EncodeAnnouncement(mine);
      Count(announced);
      const double began = CpuSeconds();
      coordinator_->Announce(0, mine, 0);
      for (int rank = 1; rank < size_; ++rank) Handle(rank, announced);
      for (const ddl::Verdict& verdict : coordinator_->TakeVerdicts()) {
        if (verdict.decision.gives_id) ids_[mine.name] = verdict.decision.id;
        Must({verdict.decision.code, verdict.decision.message});
        if (verdict.ranks.size() != static_cast<size_t>(size_)) Must({DDL_INTERNAL, "not decided for all"});
        const std::string decided = ddl::EncodeDecision(verdict.decision);
        std::vector<std::string> sent(static_cast<size_t>(size_ - 1), decided);  // one copy per rank, as in the channel
        Count(decided);
      }
      cpu_ += CpuSeconds() - began;
    }
  }

  void Print(const char* label) const {
    std::printf("\"%s\": {\"messages\": %llu, \"bytes\": %llu, \"cpu_seconds\": %.9f, \"chain\": 2}, ", label,
                static_cast<unsigned long long>(messages_), static_cast<unsigned long long>(bytes_), cpu_);
  }

 private:
  // Counts one message from or to each of the other ranks.
  void Count(const std::string& bytes) {
    messages_ += static_cast<uint64_t>(size_ - 1);
    bytes_ += static_cast<uint64_t>(size_ - 1) * bytes.size();
  }

  // Works like rank 0's engine.
  void Handle(int from, const std::string& bytes) {
    if (ddl::TypeOf(bytes) == ddl::MessageType::kAnnounce) {
      coordinator_->Announce(from, ddl::DecodeAnnouncement(bytes), 0);
      return;
    }
    uint64_t step = 0;
    const uint32_t id = ddl::DecodeKnown(bytes, &step);
    coordinator_->AnnounceKnown(from, id, step, 0);
  }

  const int size_;
  ddl::RankLocations locations_;
  std::unique_ptr<ddl::Coordinator> coordinator_;
  std::map<std::string, uint32_t> ids_;
  uint64_t messages_ = 0;
  uint64_t bytes_ = 0;
  double cpu_ = 0;
};

}  // namespace

void RunCoordinated(const World& world, int buckets) {
  Coordinated all(world);
  for (uint64_t step = 1; step <= 3; ++step) {
    all.Run(SumsOf(buckets, step));
    if (step == 1) all.Print("first");
    if (step == 3) all.Print("repeated");
  }
  for (uint64_t step = 1; step <= 3; ++step) {
    all.Run({RowsOf(step)});
    if (step == 1) all.Print("rows_first");
    if (step == 3) all.Print("rows");
  }
}

}  // namespace scale
