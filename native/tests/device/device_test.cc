// Requests with device buffers. The oracle is the same request with host buffers. With the stand-ins each
// rank has its own device; with the real libraries all ranks share the first device.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/gpu.h"
#include "kernels/kernels.h"
#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

using Bytes = std::vector<uint8_t>;

int DeviceOf(int rank) { return HasStandIn() ? rank : 0; }

constexpr size_t kMany = kSanitized ? 9001 : 70'001;

// A collective on buffers of `counts` elements.
struct Case {
  ddl_kind kind = DDL_ALL_REDUCE;
  ddl_dtype dtype = DDL_FLOAT32;
  ddl_op op = DDL_SUM;
  std::vector<size_t> counts = {1009};
  bool in_place = false;
  int root = 0;
  size_t rows = 0, row_count = 1;
  std::vector<int64_t> splits = {};
  size_t result_rows = 0;  // DDL_ALL_GATHER, DDL_ALL_TO_ALL
  uint32_t flags = 0;
  uint32_t compression = 0;
  bool first_on_host = false;
  bool exact = false;  // values whose sums are exact in every order, for the device's library

  size_t element() const { return ddl::DtypeSize(dtype); }
  bool free_rows() const { return kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL; }
  Case&& Exact() && {
    exact = true;
    return std::move(*this);
  }
  std::string Name() const {
    std::string name = std::string(ddl::KindName(kind)) + " " + ddl::DtypeName(dtype) + " " + ddl::OpName(op);
    for (const size_t count : counts) name += " " + std::to_string(count);
    return name + " flags " + std::to_string(flags) + (in_place ? " in place" : "");
  }
  Bytes Input(int rank, size_t buffer) const {
    const uint64_t seed = static_cast<uint64_t>(rank) * 100 + buffer;
    Bytes bytes = RandomElements(dtype, counts[buffer], seed);
    if (!exact) return bytes;
    // Zeros and ones; in means of float16, zeros and numbers whose sum would overflow.
    ddl::FillNeutral(dtype, DDL_PRODUCT, bytes.data(), counts[buffer]);
    for (size_t i = 0; i < counts[buffer] && dtype == DDL_FLOAT16 && op == DDL_MEAN; ++i) {
      Put(bytes, i, uint16_t{0x7b00});  // 57344
    }
    Random random(seed);
    for (size_t i = 0; i < counts[buffer]; ++i) {
      if (random.Below(2) == 1) std::memset(bytes.data() + i * element(), 0, element());
    }
    return bytes;
  }
  // Number of elements in the result of a buffer.
  size_t OutCount(size_t buffer, int rank, int size) const {
    if (kind != DDL_REDUCE_SCATTER) return free_rows() ? result_rows * row_count : counts[buffer];
    return (rows / size + (static_cast<size_t>(rank) < rows % size ? 1 : 0)) * row_count;
  }
};

// A rank's results of a case, one after another.
struct Result {
  Outcome outcome;
  Bytes bytes;
};

// A case on the device's memory, or the host's if `gpu` is null. Other collectives may start before Finish.
class Running {
 public:
  Running(ddl_comm* comm, Gpu* gpu, const Case& c, int rank, const std::string& name, bool result_on_host = false)
      : comm_(comm), gpu_(gpu), call_(c.kind, name), result_on_host_(result_on_host) {
    call_.Dtype(c.dtype).Op(c.op).Root(c.root).Flags(c.flags).Rows(c.rows, c.row_count);
    call_.request.compression = c.compression;
    call_.request.tolerance = 1e9;
    if (c.kind == DDL_ALL_TO_ALL) call_.Splits(c.splits);
    for (size_t i = 0; i < c.counts.size(); ++i) {
      Buffer& buffer = buffers_.emplace_back();
      buffer.in = c.Input(rank, i);
      buffer.result.resize(c.OutCount(i, rank, ddl_size(comm)) * c.element(), 0xa5);
      buffer.on_gpu = gpu != nullptr && !(i == 0 && c.first_on_host);
      void* const in = buffer.on_gpu ? gpu->Allocate(buffer.in.size()) : buffer.in.data();
      buffer.out = c.in_place ? in : buffer.on_gpu ? gpu->Allocate(buffer.result.size()) : buffer.result.data();
      if (buffer.on_gpu) {
        gpu->Write(in, buffer.in);
        call_.On(gpu->location(), gpu->stream());
      }
      call_.Buffer(in, c.free_rows() ? nullptr : buffer.out, c.counts[i]);
    }
    place_ = {buffers_[0].out, c.row_count, c.result_rows};
    if (c.free_rows() && !result_on_host) {
      call_.request.allocate = ddl_allocate_in_place;
      call_.request.user = &place_;
    }
  }
  Running& Start() {
    work_ = call_.Start(comm_);
    return *this;
  }
  Result Finish() {
    Result result;
    EXPECT_EQ(ddl_work_wait(work_, 60'000), 1);
    if (result_on_host_ && ddl_work_failure(work_) == nullptr) {
      const auto* const data = static_cast<const uint8_t*>(ddl_work_data(work_));
      result.bytes.assign(data, data + buffers_[0].result.size());
    }
    result.outcome = Call::Finish(work_);
    if (gpu_ != nullptr) gpu_->Synchronize();  // waits for the inputs
    for (const Buffer& buffer : buffers_) {
      if (result_on_host_) break;
      const auto* const out = static_cast<const uint8_t*>(buffer.out);
      const Bytes part = buffer.on_gpu ? gpu_->Read(out, buffer.result.size()) : Bytes(out, out + buffer.result.size());
      result.bytes.insert(result.bytes.end(), part.begin(), part.end());
    }
    return result;
  }

 private:
  struct Buffer {
    Bytes in, result;
    void* out = nullptr;
    bool on_gpu = false;
  };
  ddl_comm* const comm_;
  Gpu* const gpu_;
  Call call_;
  const bool result_on_host_;
  std::deque<Buffer> buffers_;
  ddl_place place_{};
  ddl_work* work_ = nullptr;
};

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A rank with its device.
struct Rank {
  ddl_comm* const comm;
  Gpu& gpu;
  const int rank;

  Result OnHost(const Case& c, const std::string& name = "on host") {
    return Running(comm, nullptr, c, rank, name).Start().Finish();
  }
  Result OnDevice(const Case& c, const std::string& name = "on device") {
    return Running(comm, &gpu, c, rank, name).Start().Finish();
  }
  // Checks that the case gives bit-identical results on the device and on the host.
  void ExpectSame(const Case& c, bool result_on_host = false) {
    const Result expected = OnHost(c);
    const Result received = Running(comm, &gpu, c, rank, "on device", result_on_host).Start().Finish();
    ASSERT_EQ(expected.outcome.code, DDL_OK) << expected.outcome.message;
    ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
    ASSERT_TRUE(received.bytes == expected.bytes) << c.Name() << " on rank " << rank;
  }
  // The same for concurrent cases, which rank 0 starts in order and the other ranks in reverse.
  void ExpectAllSame(const std::vector<Case>& cases) {
    std::vector<std::unique_ptr<Running>> running(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      const size_t at = rank == 0 ? i : cases.size() - 1 - i;
      running[at] = std::make_unique<Running>(comm, &gpu, cases[at], rank, "bucket " + std::to_string(at));
      running[at]->Start();
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const Result received = running[i]->Finish();
      ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
      ASSERT_TRUE(received.bytes == OnHost(cases[i]).bytes) << i;
    }
  }
  Outcome Barrier() { return Call(DDL_BARRIER, "barrier").Run(comm); }
  ddl_counters Counters() {
    ddl_counters counters{};
    ddl_count(comm, &counters);
    return counters;
  }
};

class DeviceTest : public testing::Test {
 protected:
  void TearDown() override {
    if (!HasStandIn()) return;
    Heal();
    Stall(false);
    for (const char* const what : {"contexts", "streams", "events", "allocations", "registered"}) {
      EXPECT_EQ(Alive(what), 0) << what;
    }
  }
};

using Tweak = std::function<void(ddl_device&, int rank)>;

void RunOnDevices(const std::vector<int>& group, uint32_t mode, const std::function<void(Rank&)>& body,
                  const RunOptions& options = {}, const Tweak& tweak = nullptr) {
  RunRanks(
      group,
      [&](ddl_comm* comm, int rank) {
        Gpu gpu(DeviceOf(rank));
        const auto own = [&](ddl_device& device) {
          if (tweak) tweak(device, rank);
        };
        const Outcome added = AddDevice(comm, DeviceOf(rank), mode, own);
        ASSERT_EQ(added.code, DDL_OK) << added.message;
        Rank self{comm, gpu, rank};
        body(self);
      },
      options);
}

#define SKIP_WITHOUT_STAND_IN() \
  if (!HasStandIn()) GTEST_SKIP() << "needs the stand-ins"

std::vector<Case> Reductions(int size, bool exact) {
  std::vector<Case> cases;
  for (int number = 0; number < DDL_NUM_DTYPES; ++number) {
    const auto dtype = static_cast<ddl_dtype>(number);
    for (const ddl_op op : {DDL_SUM, DDL_MEAN, DDL_MIN, DDL_MAX, DDL_PRODUCT}) {
      // A third is not exact in floating point.
      if (exact && size % 3 == 0 && op == DDL_MEAN) continue;
      cases.push_back({DDL_ALL_REDUCE, dtype, op, {7, 0, 1009, 64}});
      if (kSanitized && dtype != DDL_FLOAT32 && dtype != DDL_BFLOAT16) continue;
      for (const size_t count : {size_t{0}, size_t{1}, size_t{1009}, kMany}) {
        cases.push_back({DDL_ALL_REDUCE, dtype, op, {count}, count % 2 == 1});
      }
      for (const size_t rows : {size_t{0}, size_t{5}, static_cast<size_t>(4 * size)}) {
        cases.push_back({DDL_REDUCE_SCATTER, dtype, op, {rows * 13}, false, 0, rows, 13});
      }
    }
  }
  for (Case& c : cases) c.exact = exact;
  return cases;
}

std::vector<Case> Moves(int size, int rank) {
  std::vector<Case> cases;
  for (int root = 0; root < size; ++root) {
    cases.push_back({DDL_BROADCAST, DDL_FLOAT32, DDL_SUM, {1009, 3}, root % 2 == 1, root});
  }
  for (const bool even : {true, false}) {
    const size_t rows = even ? 5 : static_cast<size_t>(rank) * 2;
    const int all = even ? 5 * size : size * (size - 1);
    cases.push_back({DDL_ALL_GATHER, DDL_INT64, DDL_SUM, {rows * 3}, false, 0, rows, 3, {}, static_cast<size_t>(all)});
  }
  std::vector<int64_t> splits;
  size_t rows = 0;
  for (int other = 0; other < size; ++other) rows += static_cast<size_t>(splits.emplace_back(rank + other));
  cases.push_back({DDL_ALL_TO_ALL, DDL_FLOAT32, DDL_SUM, {rows * 2}, false, 0, rows, 2, splits, rows});
  return cases;
}

TEST_F(DeviceTest, StagedResultsEqualTheHostsBitForBit) {
  for (const auto& group : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 2, 2}}) {
    const int size = static_cast<int>(group.size());
    RunOnDevices(group, DDL_DEVICE_STAGED, [&](Rank& self) {
      for (const Case& c : Reductions(size, false)) self.ExpectSame(c);
      for (const Case& c : Moves(size, self.rank)) {
        self.ExpectSame(c);
        if (c.free_rows()) self.ExpectSame(c, true);
      }
      EXPECT_GT(self.Counters().staged, 0u);
      EXPECT_EQ(self.Counters().by_device, 0u);
    });
  }
}

TEST_F(DeviceTest, StagedSupportsFlagsCompressionAndMixedBuffers) {
  for (const auto& group : {std::vector<int>{0, 1}, std::vector<int>{0, 0, 2}}) {
    RunOnDevices(group, DDL_DEVICE_STAGED, [&](Rank& self) {
      for (const uint32_t flags : {DDL_FLAG_PLAIN_MPI, DDL_FLAG_CHECK, DDL_FLAG_ALL_RANKS, DDL_FLAG_BLOCKING}) {
        Case c = Case().Exact();
        c.flags = flags;
        self.ExpectSame(c);
      }
      for (const uint32_t compression : {DDL_COMPRESSION_BFLOAT16, DDL_COMPRESSION_FLOAT16}) {
        Case c{DDL_ALL_REDUCE, DDL_FLOAT32, DDL_SUM, {5000, 77}};
        c.compression = compression;
        self.ExpectSame(c);
      }
      self.ExpectSame(Case{DDL_ALL_REDUCE, DDL_FLOAT32, DDL_ADASUM, {100, 33}}.Exact());
      Case both{DDL_ALL_REDUCE, DDL_FLOAT32, DDL_SUM, {1009, 2048}};
      both.first_on_host = true;
      self.ExpectSame(both);
    });
  }
}

TEST_F(DeviceTest, StagedRunsManyRequestsAndMoreThanTheStagingMemory) {
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](Rank& self) {
    std::vector<Case> cases(24);
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[i].counts = {i == 5 ? size_t{kSanitized ? 1'000'003 : 5'000'011} : 1000 * i + 1};
      cases[i].in_place = i % 2 == 0;
    }
    self.ExpectAllSame(cases);
  });
}

TEST_F(DeviceTest, PlannedRequestsAreStagedUnlessTheLibraryRunsThem) {
  RunOptions options;
  options.lane = true;
  for (const uint32_t mode : {DDL_DEVICE_STAGED, DDL_DEVICE_AUTO}) {
    const uint64_t by_library = HasStandIn() && mode == DDL_DEVICE_AUTO ? 10 : 0;
    RunOnDevices(
        {0, 0}, mode,
        [&](Rank& self) {
          const Case c = Case().Exact();
          const Bytes in = c.Input(self.rank, 0);
          for (uint64_t run = 1; run <= 5; ++run) {
            for (uint32_t index = 0; index < 2; ++index) {
              void* const data = self.gpu.Allocate(in.size());
              self.gpu.Write(data, in);
              Call call(DDL_ALL_REDUCE, "planned " + std::to_string(index));
              call.On(self.gpu.location(), self.gpu.stream()).Buffer(data, data, c.counts[0]);
              call.request.plan = 77;
              call.request.plan_run = run;
              call.request.plan_index = index;
              call.request.plan_size = 2;
              const Outcome outcome = call.Run(self.comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              ASSERT_TRUE(self.gpu.Read(data, in.size()) == self.OnHost(c).bytes);
            }
          }
          EXPECT_EQ(self.Counters().by_device, by_library);
          EXPECT_EQ(self.Counters().planned, 10 - by_library);
          EXPECT_EQ(self.Counters().staged, 10 - by_library);
        },
        options);
  }
}

// The memory that `allocate` returns may be in use by work that the stream got after the request.
TEST_F(DeviceTest, GatheredRowsWaitForTheLastUseOfTheirMemory) {
  SKIP_WITHOUT_STAND_IN();
  Case c;
  c.kind = DDL_ALL_GATHER;
  c.rows = 5;
  c.result_rows = 10;
  c.counts = {5};
  struct Place {
    Gpu& gpu;
    void* memory = gpu.Allocate(40);
    Bytes used = Bytes(40, 0xa5);
  };
  for (const uint32_t mode : {DDL_DEVICE_STAGED, DDL_DEVICE_AUTO}) {
    RunOnDevices({0, 0}, mode, [&](Rank& self) {
      Place place{self.gpu};
      const Bytes in = c.Input(self.rank, 0);
      void* const data = self.gpu.Allocate(in.size());
      self.gpu.Write(data, in);
      Call call(c.kind, "late");
      call.Dtype(c.dtype).Rows(c.rows, c.row_count).On(self.gpu.location(), self.gpu.stream()).Buffer(data, nullptr, 5);
      call.request.user = &place;
      call.request.allocate = [](void* user, const uint64_t*, int) {
        Place& result = *static_cast<Place*>(user);
        const Gpu context(result.gpu.location().id);  // of this thread
        for (int use = 0; use < 20; ++use) result.gpu.Write(result.memory, result.used);
        return result.memory;
      };
      const Outcome outcome = call.Run(self.comm);
      ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
      self.gpu.Synchronize();
      EXPECT_TRUE(self.gpu.Read(place.memory, 40) == self.OnHost(c).bytes) << mode;
    });
  }
}

TEST_F(DeviceTest, JoinedRanksCountAsZeros) {
  for (const uint32_t mode : {DDL_DEVICE_STAGED, DDL_DEVICE_AUTO}) {
    RunOnDevices({0, 0, 0}, mode, [&](Rank& self) {
      // On host memory, too, a joined rank counts as zeros.
      if (self.rank < 2) self.ExpectSame(Case().Exact());
      int32_t last = -1;
      ASSERT_EQ(Call(DDL_JOIN, "").Buffer(nullptr, &last, 1).Run(self.comm).code, DDL_OK);
    });
  }
}

TEST_F(DeviceTest, OneRankMayHaveItsDataOnTheHost) {
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](Rank& self) {
    const Result expected = self.OnHost(Case(), "sum");
    const Result received = self.rank == 0 ? self.OnDevice(Case(), "sum") : self.OnHost(Case(), "sum");
    ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
    EXPECT_TRUE(received.bytes == expected.bytes);
  });
}

TEST_F(DeviceTest, RefusesMemoryOfOtherDevices) {
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    Gpu gpu(DeviceOf(rank));
    void* const data = gpu.Allocate(4);
    const auto refuse = [&](const ddl_location& location, const std::string& why) {
      const Outcome outcome = Call(DDL_ALL_REDUCE, "sum").On(location, nullptr).Buffer(data, data, 1).Run(comm);
      EXPECT_EQ(outcome.code, DDL_INVALID_ARGUMENT);
      EXPECT_TRUE(Contains(outcome.message, why)) << outcome.message;
    };
    refuse(gpu.location(), "(it has none)");
    ASSERT_EQ(AddDevice(comm, DeviceOf(rank), DDL_DEVICE_STAGED).code, DDL_OK);
    const int other = DeviceOf(rank) + 1;
    refuse({DDL_CUDA, other}, "Received: cuda:" + std::to_string(other));
    EXPECT_EQ(AddDevice(comm, DeviceOf(rank), DDL_DEVICE_STAGED).code, DDL_FAILED_PRECONDITION);
  });
}

TEST_F(DeviceTest, RefusesAMissingDevice) {
  char error[512] = "";
  ddl_device device;
  EXPECT_EQ(ddl_cuda_open(1000, 0, &device, error, sizeof error), DDL_UNAVAILABLE);
  EXPECT_TRUE(Contains(error, "cuda:1000")) << error;
  SKIP_WITHOUT_STAND_IN();
  for (const char* const function : {"cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate"}) {
    FailNext(function);
    EXPECT_EQ(ddl_cuda_open(0, 1, &device, error, sizeof error), DDL_UNAVAILABLE) << function;
  }
}

TEST_F(DeviceTest, RanksMustAgreeOnTheMode) {
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    const Outcome added = AddDevice(comm, DeviceOf(rank), rank == 0 ? DDL_DEVICE_AUTO : DDL_DEVICE_STAGED);
    EXPECT_EQ(added.code, DDL_FAILED_PRECONDITION);
    EXPECT_TRUE(Contains(added.message, "KERAS_DDL_DEVICE")) << added.message;
  });
}

// A failure of one rank's device fails the collective on all ranks, quickly.
TEST_F(DeviceTest, ADeviceFailureFailsTheCollectiveOnAllRanks) {
  SKIP_WITHOUT_STAND_IN();
  for (const char* const function : {"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2",
                                     "cuMemcpyHtoDAsync_v2", "cuEventQuery"}) {
    RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](Rank& self) {
      Bytes host(4036);
      void* const data = self.gpu.Allocate(host.size());
      ASSERT_EQ(self.Barrier().code, DDL_OK);
      if (self.rank == 0) FailNext(function);
      Call call(DDL_ALL_REDUCE, "sum");
      // Rank 1's data is on the host, so the failure is rank 0's.
      if (self.rank == 0) {
        call.On(self.gpu.location(), self.gpu.stream()).Buffer(data, data, 1009);
      } else {
        call.Buffer(host.data(), host.data(), 1009);
      }
      const Outcome outcome = call.Run(self.comm);
      if (self.rank == 1 && outcome.code == DDL_OK) return;  // it got rank 0's data before the failure
      EXPECT_EQ(outcome.code, self.rank == 0 ? DDL_INTERNAL : DDL_ABORTED) << function;
      EXPECT_TRUE(Contains(outcome.message, "injected by a test")) << function << ": " << outcome.message;
    });
    Heal();
  }
}

TEST_F(DeviceTest, WorksWithoutLockedMemory) {
  SKIP_WITHOUT_STAND_IN();
  FailNext("cuMemHostRegister_v2", true);
  const int64_t before = Alive("pageable");
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](Rank& self) { self.ExpectSame(Case()); });
  EXPECT_GT(Alive("pageable"), before);
}

TEST_F(DeviceTest, AHangingDeviceFailsAtTheDeadline) {
  SKIP_WITHOUT_STAND_IN();
  RunOptions options;
  options.deadline_s = 0.5;
  std::atomic<int> ended{0};
  RunOnDevices(
      {0, 0}, DDL_DEVICE_STAGED,
      [&](Rank& self) {
        void* const data = self.gpu.Allocate(4000);
        ASSERT_EQ(self.Barrier().code, DDL_OK);
        Stall(true);
        Call sum(DDL_ALL_REDUCE, "sum");
        const Outcome outcome = sum.On(self.gpu.location(), self.gpu.stream()).Buffer(data, data, 1000).Run(self.comm);
        EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
        EXPECT_TRUE(Contains(outcome.message, "its own device")) << outcome.message;
        if (++ended == 2) Stall(false);
        while (ended < 2) std::this_thread::yield();
      },
      options);
}

TEST_F(DeviceTest, MemoryOfAFailedRequestIsNotReusedWhileItsCopyRuns) {
  SKIP_WITHOUT_STAND_IN();
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](Rank& self) {
    for (int round = 0; round < 24; ++round) {
      ASSERT_EQ(self.Barrier().code, DDL_OK);
      Stall(true);
      void* const data = self.gpu.Allocate(4036);
      Call mismatch(DDL_ALL_REDUCE, "mismatch");
      mismatch.Op(self.rank == 0 ? DDL_SUM : DDL_MAX).On(self.gpu.location(), self.gpu.stream());
      EXPECT_EQ(mismatch.Buffer(data, data, 1009).Run(self.comm).code, DDL_FAILED_PRECONDITION);
      const Case move{DDL_BROADCAST};
      if (self.rank == 0) {
        ASSERT_EQ(self.OnHost(move, "move").outcome.code, DDL_OK);
        continue;
      }
      Running moved(self.comm, &self.gpu, move, self.rank, "move");
      moved.Start();
      usleep(20'000);
      Stall(false);
      EXPECT_TRUE(moved.Finish().bytes == move.Input(0, 0));
    }
  });
}

TEST_F(DeviceTest, ARankThatLeavesEndsAStagedCollective) {
  RunOptions options;
  options.leave_early = {1};
  RunOnDevices(
      {0, 0}, DDL_DEVICE_STAGED,
      [&](Rank& self) {
        self.ExpectSame(Case());
        if (self.rank == 1) return;
        const Result result = self.OnDevice(Case(), "alone");
        EXPECT_EQ(result.outcome.code, DDL_UNAVAILABLE);
        EXPECT_TRUE(Contains(result.outcome.message, "rank 1")) << result.outcome.message;
      },
      options);
}

// ---- the device's library, among all ranks or inside hosts

TEST_F(DeviceTest, TheLibraryRunsOnOneRank) {
  RunOnDevices({0}, DDL_DEVICE_LIBRARY, [&](Rank& self) {
    for (const Case& c : Reductions(1, true)) self.ExpectSame(c);
    for (const Case& c : Moves(1, self.rank)) self.ExpectSame(c);
    EXPECT_GT(self.Counters().by_device, 0u);
  });
}

TEST_F(DeviceTest, TheLibraryGivesTheHostsResults) {
  SKIP_WITHOUT_STAND_IN();
  struct {
    std::vector<int> group;
    uint32_t mode;
  } const kWays[] = {{{0, 0}, DDL_DEVICE_AUTO},
                     {{0, 0, 0}, DDL_DEVICE_HIERARCHICAL},
                     {{0, 1}, DDL_DEVICE_LIBRARY},
                     {{0, 0, 2, 2}, DDL_DEVICE_HIERARCHICAL},
                     {{0, 1, 0, 1, 0, 1}, DDL_DEVICE_HIERARCHICAL}};
  for (const auto& [group, mode] : kWays) {
    const int size = static_cast<int>(group.size());
    const bool inside = size > 3;
    RunOnDevices(group, mode, [&](Rank& self) {
      uint64_t expected = 0;
      for (const Case& c : Reductions(size, true)) {
        self.ExpectSame(c);
        if (testing::Test::HasFatalFailure()) return;
        const bool integer_mean = c.op == DDL_MEAN && c.dtype >= DDL_INT32;
        expected += !integer_mean && (inside ? c.kind == DDL_ALL_REDUCE : c.rows % size == 0) ? 1 : 0;
      }
      EXPECT_EQ(inside ? self.Counters().hierarchical : self.Counters().by_device, expected);
      for (const Case& c : Moves(size, self.rank)) self.ExpectSame(c);
      // The broadcasts and the even all_gather.
      EXPECT_EQ(self.Counters().by_device, inside ? 0 : expected + static_cast<uint64_t>(size) + 1);
    });
  }
}

TEST_F(DeviceTest, TheLibraryRunsWhatItSupportsAndTheHostTheRest) {
  SKIP_WITHOUT_STAND_IN();
  for (const auto& group : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 2, 2}}) {
    RunOnDevices(group, DDL_DEVICE_HIERARCHICAL, [&](Rank& self) {
      std::vector<Case> cases;
      for (size_t i = 0; i < 20; ++i) {
        cases.push_back({DDL_ALL_REDUCE, DDL_FLOAT32, i % 3 == 0 ? DDL_ADASUM : DDL_SUM, {100 * i + 1}});
        cases.back().exact = true;
      }
      self.ExpectAllSame(cases);
      EXPECT_EQ(self.Counters().by_device + self.Counters().hierarchical, 13u);
      EXPECT_EQ(self.Counters().staged, 7u);
    });
  }
}

TEST_F(DeviceTest, TheModeAndTheTopologyChooseTheWay) {
  // How the first sum runs, or why the mode is refused.
  const auto way = [](const std::vector<int>& group, uint32_t mode, bool own_devices = true) {
    std::mutex mutex;
    std::string found;
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      const int ordinal = own_devices ? rank : 0;
      Gpu gpu(ordinal);
      const Outcome added = AddDevice(comm, ordinal, mode);
      Rank self{comm, gpu, rank};
      if (added.code == DDL_OK) self.ExpectSame(Case().Exact());
      const ddl_counters counters = self.Counters();
      const std::lock_guard<std::mutex> lock(mutex);
      found = added.code != DDL_OK         ? added.message
              : counters.by_device != 0    ? "library"
              : counters.hierarchical != 0 ? "hierarchical"
                                           : "staged";
    });
    return found;
  };
  const std::string shared = "2 ranks have 1 device(s), and the library needs one for each rank";
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_AUTO, false), "staged");
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_LIBRARY, false), shared);
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_HIERARCHICAL, false), shared);
  SKIP_WITHOUT_STAND_IN();
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_AUTO), "library");
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_STAGED), "staged");
  EXPECT_EQ(way({0, 0}, DDL_DEVICE_HIERARCHICAL), "library");
  EXPECT_EQ(way({0, 1}, DDL_DEVICE_LIBRARY), "library");
  EXPECT_EQ(way({0, 1}, DDL_DEVICE_HIERARCHICAL), "staged");
  EXPECT_EQ(way({0, 0, 2, 2}, DDL_DEVICE_HIERARCHICAL), "hierarchical");
  EXPECT_TRUE(Contains(way({0, 0, 2}, DDL_DEVICE_HIERARCHICAL), "different numbers of ranks"));
}

// Replaces functions of a device's table; the originals are here.
ddl_device original;
void Slow(bool slow) { usleep(!slow ? 0 : kSanitized ? 300'000 : 30'000); }

// On two hosts, `auto` tries every way, and all ranks take the one whose slowest rank is the fastest. The others are
// slow on one rank each, at the end, which no other rank feels: alone they would choose otherwise.
TEST_F(DeviceTest, RanksChooseTheFastestWayTogether) {
  SKIP_WITHOUT_STAND_IN();
  static constexpr size_t kCount = 4096;
  static constexpr uint64_t kTrials = 12;
  enum { kLibrary, kHierarchical, kStaged };
  static std::atomic<int> quick;
  static std::atomic<bool> slow;
  for (const int fastest : {kLibrary, kHierarchical, kStaged}) {
    quick = fastest;
    RunOnDevices(
        {0, 0, 2, 2}, DDL_DEVICE_AUTO,
        [&](Rank& self) {
          const Case c = Case{DDL_ALL_REDUCE, DDL_FLOAT32, DDL_SUM, {kCount}}.Exact();
          for (uint64_t i = 0; i < kTrials + 6; ++i) self.ExpectSame(c);
          const ddl_counters counters = self.Counters();
          const uint64_t runs[] = {counters.by_device, counters.hierarchical, counters.staged};
          for (const int way : {kLibrary, kHierarchical, kStaged}) {
            EXPECT_EQ(runs[way], kTrials / 3 + (way == fastest ? 6 : 0)) << way << " of " << fastest;
          }
          // Another kind and another size are tried anew.
          self.ExpectSame({DDL_BROADCAST});
          self.ExpectSame(Case{DDL_ALL_REDUCE, DDL_FLOAT32, DDL_SUM, {8}}.Exact());
          EXPECT_EQ(self.Counters().by_device, counters.by_device + 2);
        },
        {},
        [&](ddl_device& device, int rank) {
          if (rank == 0) original = device;
          if (rank == 1) {
            device.run = [](void* self, int group, const ddl_device_collective* collective, void* after) {
              slow = group == DDL_ALL_RANKS ? quick != kLibrary
                                            : collective->kind == DDL_ALL_GATHER && quick != kHierarchical;
              return original.run(self, group, collective, after);
            };
            device.finish = [](void* self, void** event) {
              Slow(slow);
              return original.finish(self, event);
            };
          } else if (rank == 2) {
            device.copy = [](void* self, int to_host, void* after, const ddl_device_copy* copies, uint32_t n,
                             void** event) {
              // Inside hosts only a rank's share is copied.
              Slow(to_host == 0 && copies->bytes == kCount * 4 && quick != kStaged);
              return original.copy(self, to_host, after, copies, n, event);
            };
          }
        });
  }
}

TEST_F(DeviceTest, TheLibraryNeedsAllRanksDataOnDevices) {
  SKIP_WITHOUT_STAND_IN();
  RunOnDevices({0, 0}, DDL_DEVICE_AUTO, [&](Rank& self) {
    const Result result = self.rank == 0 ? self.OnDevice(Case(), "sum") : self.OnHost(Case(), "sum");
    EXPECT_EQ(result.outcome.code, DDL_FAILED_PRECONDITION);
    EXPECT_TRUE(Contains(result.outcome.message, "of a device")) << result.outcome.message;
    self.ExpectSame(Case());
  });
}

TEST_F(DeviceTest, ALibraryThatCannotConnectIsAbandonedByAllRanks) {
  SKIP_WITHOUT_STAND_IN();
  static std::mutex mutex;
  static std::string warnings;
  RunOptions options;
  options.warn = [](void*, const char* text) {
    const std::lock_guard<std::mutex> lock(mutex);
    warnings += text;
  };
  struct {
    std::vector<int> group;
    uint32_t required;
  } const kWays[] = {{{0, 0}, DDL_DEVICE_LIBRARY}, {{0, 0, 2, 2}, DDL_DEVICE_HIERARCHICAL}};
  for (const auto& [group, required] : kWays) {
    for (const char* const function : {"ncclCommInitRankConfig", "ncclAsync"}) {
      warnings.clear();
      FailNext(function);
      RunOnDevices(
          group, DDL_DEVICE_AUTO,
          [&](Rank& self) {
            for (int i = 0; i < 3; ++i) self.ExpectSame(Case().Exact());
            EXPECT_EQ(self.Counters().by_device, 0u);
          },
          options);
      EXPECT_TRUE(Contains(warnings, "as a test asked for")) << warnings;
      EXPECT_TRUE(Contains(warnings, "pass through the memory of the host")) << warnings;
      FailNext(function);
      RunOnDevices(group, required, [&](Rank& self) {
        const Result result = self.OnDevice(Case(), "sum");
        EXPECT_NE(result.outcome.code, DDL_OK);
        EXPECT_TRUE(Contains(result.outcome.message, "connect")) << result.outcome.message;
      });
      Heal();
    }
  }
  FailNext("ncclGetUniqueId");
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    const Outcome added = AddDevice(comm, DeviceOf(rank), DDL_DEVICE_AUTO);
    EXPECT_EQ(added.code, DDL_INTERNAL) << added.message;
  });
}

// An error of NCCL, at a call or in the background, or of a copy, in each phase of a collective.
TEST_F(DeviceTest, ALibraryFailureFailsTheCollectiveOnAllRanks) {
  SKIP_WITHOUT_STAND_IN();
  struct {
    std::vector<int> group;
    std::vector<const char*> functions;
  } const kWays[] = {
      {{0, 0}, {"ncclAllReduce", "ncclGroupEnd", "ncclAsync"}},
      {{0, 0, 2, 2},
       {"ncclReduceScatter", "ncclAsync in ncclReduceScatter", "ncclAllReduce", "ncclAsync in ncclAllReduce",
        "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "ncclAllGather", "ncclAsync in ncclAllGather"}}};
  for (const auto& [group, functions] : kWays) {
    for (const char* const function : functions) {
      std::atomic<int> ended{0};
      RunOnDevices(group, DDL_DEVICE_HIERARCHICAL, [&](Rank& self) {
        const Case c = Case().Exact();
        self.ExpectSame(c);
        Running last(self.comm, &self.gpu, c, self.rank, "last");
        ASSERT_EQ(self.Barrier().code, DDL_OK);
        if (self.rank == 0) FailNext(function);
        ASSERT_EQ(self.Barrier().code, DDL_OK);
        const auto begun = std::chrono::steady_clock::now();
        Outcome outcome = last.Start().Finish().outcome;
        EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
        // A rank that finished its part before the failure learns of it in the next collective.
        if (outcome.code == DDL_OK) outcome = self.Barrier();
        EXPECT_NE(outcome.code, DDL_OK) << function;
        EXPECT_TRUE(Contains(outcome.message, "as a test asked for") || Contains(outcome.message, "injected by a test"))
            << function << outcome.message;
        ++ended;
      });
      EXPECT_EQ(ended, static_cast<int>(group.size()));
      Heal();
    }
  }
}

// Rank 1 closes in the middle of a collective, which it never ends, in each phase.
TEST_F(DeviceTest, ALostRankEndsALibraryCollective) {
  SKIP_WITHOUT_STAND_IN();
  RunOptions options;
  options.leave_early = {1};
  static std::atomic<bool> armed, hangs;
  static std::atomic<std::chrono::steady_clock::time_point> hung;
  static std::atomic<int> phase;  // a ddl_kind; -1: the copy to the host
  struct {
    std::vector<int> group;
    std::vector<int> phases;
  } const kWays[] = {{{0, 0, 0}, {DDL_ALL_REDUCE}},
                     {{0, 0, 2, 2}, {DDL_REDUCE_SCATTER, DDL_ALL_REDUCE, -1, DDL_ALL_GATHER}}};
  for (const auto& [group, phases] : kWays) {
    for (const int where : phases) {
      armed = hangs = false;
      hung = std::chrono::steady_clock::now() + std::chrono::hours(1);
      phase = where;
      RunOnDevices(
          group, DDL_DEVICE_HIERARCHICAL,
          [&](Rank& self) {
            const Case c = Case().Exact();
            self.ExpectSame(c);
            ASSERT_EQ(self.Barrier().code, DDL_OK);
            armed = true;
            const auto begun = std::chrono::steady_clock::now();
            Running last(self.comm, &self.gpu, c, self.rank, "last");
            last.Start();
            if (self.rank == 1) {
              while (!hangs) std::this_thread::yield();
              hung = std::chrono::steady_clock::now();
              ddl_close(self.comm);
            }
            Outcome outcome = last.Finish().outcome;
            EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(15));
            // The other host has its result before the last phase, and learns of it in the next collective.
            if (phase == DDL_ALL_GATHER && self.rank > 1 && outcome.code == DDL_OK) outcome = self.Barrier();
            EXPECT_EQ(outcome.code, self.rank == 1 ? DDL_NOT_FOUND : DDL_UNAVAILABLE) << where << outcome.message;
            if (self.rank == 1) return;
            EXPECT_TRUE(Contains(outcome.message, "rank 1 has left")) << outcome.message;
          },
          options,
          [](ddl_device& device, int rank) {
            if (rank == 0) original = device;
            if (rank != 1) return;
            device.run = [](void* self, int to, const ddl_device_collective* collective, void* after) {
              if (armed && static_cast<int>(collective->kind) == phase) hangs = true;
              return hangs ? static_cast<int>(DDL_OK) : original.run(self, to, collective, after);
            };
            device.poll = [](void* self, int to, int* ready) {
              const int code = original.poll(self, to, ready);
              if (hangs) *ready = 0;
              return code;
            };
            device.copy = [](void* self, int to_host, void* after, const ddl_device_copy* copies, uint32_t n,
                             void** event) {
              if (armed && to_host != 0 && phase == -1) hangs = true;
              return original.copy(self, to_host, after, copies, n, event);
            };
            device.test = [](void* self, void* event, int* done) {
              const int code = original.test(self, event, done);
              // The copy ends when the rank has given up, so that its memory comes back.
              if (hangs && std::chrono::steady_clock::now() < hung.load() + std::chrono::seconds(3)) *done = 0;
              return code;
            };
          });
    }
  }
}

}  // namespace
}  // namespace ddl_test
