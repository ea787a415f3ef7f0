#include "thread_group.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "thread_transport.h"

namespace ddl_test {
namespace {

constexpr int kPatienceMs = 120'000;

// Lets `expected` threads continue together.
class Gate {
 public:
  explicit Gate(int expected) : missing_(expected) {}
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) all_here_.notify_all();
    all_here_.wait(lock, [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int missing_;
};

}  // namespace

void RunRanks(const std::vector<int>& group, const std::function<void(ddl_comm*, int rank)>& body,
              const RunOptions& options) {
  const int size = static_cast<int>(group.size());
  std::vector<ddl_transport> transports = MakeThreadTransports(size);
  std::vector<ddl_transport> lanes;
  if (options.lane) lanes = MakeThreadTransports(size);
  const std::vector<int32_t> leaders(group.begin(), group.end());
  Gate finished(size - static_cast<int>(options.leave_early.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ddl_options settings{};
      settings.abi_version = DDL_ABI_VERSION;
      settings.group = leaders.data();
      settings.outer = options.outer.data();
      settings.num_outer = static_cast<uint32_t>(options.outer.size());
      settings.staging_bytes = options.staging_bytes;
      settings.warn_after_s = options.warn_after_s;
      settings.deadline_s = options.deadline_s;
      settings.lost_after_s = options.lost_after_s;
      settings.warn = options.warn;
      settings.warn_user = options.warn_user;
      if (options.tweak) options.tweak(transports[rank]);
      char error[2048] = "";
      ddl_comm* const comm = ddl_create(&transports[rank], &settings, error, sizeof error);
      if (comm == nullptr) {
        ADD_FAILURE() << "rank " << rank << ": " << error;
      } else {
        if (options.lane) {
          if (options.tweak_lane) options.tweak_lane(lanes[rank]);
          EXPECT_EQ(ddl_add_lane(comm, &lanes[rank], &settings, error, sizeof error), DDL_OK) << error;
        }
        body(comm, rank);
      }
      if (options.leave_early.count(rank) == 0) finished.Pass();
      if (comm != nullptr) ddl_destroy(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<int> AllTogether(int size) { return std::vector<int>(size, 0); }

std::vector<int> AllApart(int size) {
  std::vector<int> group;
  for (int rank = 0; rank < size; ++rank) group.push_back(rank);
  return group;
}

Call::Call(ddl_kind kind, std::string name) : name_(std::move(name)) {
  request.kind = kind;
  request.dtype = DDL_FLOAT32;
  request.op = DDL_SUM;
}

Call& Call::Dtype(ddl_dtype dtype) {
  request.dtype = dtype;
  return *this;
}

Call& Call::Op(ddl_op op) {
  request.op = op;
  return *this;
}

Call& Call::Root(int root) {
  request.root = root;
  return *this;
}

Call& Call::Flags(uint32_t flags) {
  request.flags = flags;
  return *this;
}

Call& Call::Detail(const char* detail) {
  request.detail = detail;
  return *this;
}

Call& Call::Buffer(const void* in, void* out, uint64_t count) {
  buffers_.push_back({in, out, count, location_});
  return *this;
}

Call& Call::On(ddl_location location, void* stream) {
  location_ = location;
  request.stream = stream;
  return *this;
}

Call& Call::Rows(uint64_t rows, uint64_t row_count) {
  request.rows = rows;
  request.row_count = row_count;
  return *this;
}

Call& Call::Splits(std::vector<int64_t> splits) {
  splits_ = std::move(splits);
  request.splits = splits_.data();
  return *this;
}

void Call::Complete() {
  request.name = name_.c_str();
  request.buffers = buffers_.data();
  request.num_buffers = static_cast<uint32_t>(buffers_.size());
}

int Call::TryRun(ddl_comm* comm, uint32_t patience_us) {
  Complete();
  return ddl_try_run(comm, &request, patience_us);
}

Outcome OutcomeOf(const ddl_failure* failure) {
  if (failure == nullptr) return {};
  Outcome outcome{failure->code, failure->message, failure->name, {}};
  for (uint32_t i = 0; i < failure->num_ranks; ++i) outcome.roles[failure->ranks[i].rank] = failure->ranks[i].role;
  return outcome;
}

ddl_work* Call::Start(ddl_comm* comm) {
  Complete();
  return ddl_start(comm, &request);
}

Outcome Call::Finish(ddl_work* work) {
  if (ddl_work_wait(work, kPatienceMs) == 0) {
    std::fprintf(stderr, "a request was not done after %d s\n", kPatienceMs / 1000);
    std::abort();
  }
  const Outcome outcome = OutcomeOf(ddl_work_failure(work));
  ddl_work_free(work);
  return outcome;
}

}  // namespace ddl_test
