#include "shm/cma_step.h"

#include <time.h>

#include <algorithm>

#include "base/guard.h"

namespace ddl {
namespace {

// Time to find the root cause, that is, to learn that a process ended or why a rank gave up. Buffers are already safe.
constexpr double kAttributionSeconds = 3;

// Returns the reason why a rank's memory is gone: it died, or gave up. This becomes known a little later, because the
// system frees a process's memory first.
Status RootCause(ShmPipeline& pipeline, const Status& status) {
  const double start = Now();
  Status health = pipeline.Health();
  while (health.ok() && status.code() != DDL_DEADLINE_EXCEEDED && Now() - start < kAttributionSeconds) {
    const timespec pause{0, 1'000'000};
    nanosleep(&pause, nullptr);
    health = pipeline.Health();
  }
  return health.ok() ? status : health;
}

constexpr uint64_t kNotAccessible = ~uint64_t{0};

}  // namespace

// A run of elements that is contiguous both in a rank's `in` and in its `out`.
struct CmaStep::Piece {
  char* in;
  char* out;
  uint64_t begin;  // bytes before it
  uint64_t bytes;
};

// What a rank puts into its slot for the others.
struct CmaStep::PieceTable {
  uint64_t count;  // kNotAccessible: too many for the slot, or not open to the system calls
  Piece pieces[1];
};

Status CmaStep::Run(ShmPipeline& pipeline, const View& in, const View& out, bool* fit,
                    const std::function<Status(CmaStep&)>& work) {
  CmaStep step(pipeline, in.element_bytes());
  const Status status = GuardMemory(
      [&]() -> Status {
        DDL_RETURN_IF_ERROR(step.Begin(in, out, fit));
        if (*fit) DDL_RETURN_IF_ERROR(work(step));
        // This rank no longer touches the others' memory.
        pipeline.MarkDone(step.step_);
        return pipeline.WaitDone(step.step_);
      },
      [&](const std::exception&) -> Status {
        pipeline.peers().RevokeAccess();
        throw;
      });
  if (status.ok()) return {};
  pipeline.peers().RevokeAccess();
  return RootCause(pipeline, status);
}

Status CmaStep::Begin(const View& in, const View& out, bool* fit) {
  DDL_RETURN_IF_ERROR(pipeline_.WaitFree(step_));
  Publish(in, out);
  pipeline_.ResetClaims();
  pipeline_.MarkReady(step_);
  DDL_RETURN_IF_ERROR(pipeline_.WaitReady(step_));
  *fit = true;
  for (int j = 0; j < pipeline_.size(); ++j) *fit = *fit && TableOf(j)->count != kNotAccessible;
  return {};
}

void CmaStep::Publish(const View& in, const View& out) {
  PieceTable* const table = TableOf(pipeline_.rank());
  const uint64_t room = (pipeline_.slot_bytes() - sizeof(PieceTable)) / sizeof(Piece) + 1;
  uint64_t count = 0;
  remote_.clear();
  View::ForEachPair(in, out, 0, in.count(), [&](char* from, char* to, uint64_t at, uint64_t n) {
    if (count++ >= room) return;
    table->pieces[count - 1] = {from, to, at * bytes_, n * bytes_};
    remote_.push_back({from, 1});
    if (to != from) remote_.push_back({to, 1});
  });
  table->count = count <= room && PeerMemory::Accessible(remote_) ? count : kNotAccessible;
}

void CmaStep::Find(int j, uint64_t at, uint64_t count, char* Piece::* side, std::vector<iovec>* list) const {
  list->clear();
  if (count == 0) return;
  const PieceTable* const table = TableOf(j);
  const Piece* const end = table->pieces + table->count;
  uint64_t begin = at * bytes_;
  uint64_t left = count * bytes_;
  const Piece* piece =
      std::upper_bound(table->pieces, end, begin, [](uint64_t offset, const Piece& p) { return offset < p.begin; }) - 1;
  for (; left > 0; ++piece) {
    const uint64_t skip = begin - piece->begin;
    const uint64_t n = std::min(piece->bytes - skip, left);
    list->push_back({piece->*side + skip, n});
    begin += n;
    left -= n;
  }
}

Status CmaStep::Read(int j, uint64_t at, const View& to, uint64_t to_at, uint64_t count) {
  local_.clear();
  to.ForEach(to_at, count, [&](char* data, uint64_t, uint64_t n) { local_.push_back({data, n * bytes_}); });
  Find(j, at, count, &Piece::in, &remote_);
  return pipeline_.peers().Read(j, local_, remote_);
}

Status CmaStep::Write(int j, uint64_t at, uint64_t count) {
  Find(pipeline_.rank(), at, count, &Piece::out, &local_);
  Find(j, at, count, &Piece::out, &remote_);
  return pipeline_.peers().Write(j, local_, remote_);
}

Status CmaStep::Reduce(const View& own, uint64_t own_begin, const View& result, uint64_t own_at, uint64_t count,
                       const Reduction& reduction) {
  const int me = pipeline_.rank();
  const int size = pipeline_.size();
  char* const scratch = pipeline_.RecvScratch(static_cast<size_t>(size) * count * bytes_);
  const auto scratch_of = [&](int j) { return scratch + static_cast<uint64_t>(j) * count * bytes_; };
  // Each rank starts with its neighbour, so that the ranks do not all read from the same rank.
  for (int i = 1; i < size; ++i) {
    const int j = (me + i) % size;
    DDL_RETURN_IF_ERROR(Read(j, own_begin + own_at, View(bytes_, scratch_of(j), count), 0, count));
  }
  View::ForEachPair(own, result, own_at, count, [&](const char* mine, char* to, uint64_t from, uint64_t n) {
    for (int j = 0; j < size; ++j) {
      sources_[static_cast<size_t>(j)] = j == me ? mine : scratch_of(j) + from * bytes_;
    }
    ddl::Reduce(reduction.dtype, reduction.op, sources_.data(), size, to, n, reduction.divisor, Store::kCached);
  });
  return {};
}

}  // namespace ddl
