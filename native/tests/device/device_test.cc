// Requests with device buffers. The oracle is the same request with host buffers. With the stand-ins each
// rank has its own device; with the real libraries all ranks share the first device.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/gpu.h"
#include "kernels/kernels.h"
#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

using Bytes = std::vector<uint8_t>;

int DeviceOf(int rank) { return HasStandIn() ? rank : 0; }

const std::vector<ddl_dtype> kDtypes = kSanitized
                                           ? std::vector<ddl_dtype>{DDL_FLOAT32, DDL_BFLOAT16, DDL_INT8}
                                           : std::vector<ddl_dtype>{DDL_FLOAT32, DDL_FLOAT64, DDL_FLOAT16, DDL_BFLOAT16,
                                                                    DDL_INT32,   DDL_INT64,   DDL_UINT8,   DDL_INT8};
const std::vector<ddl_op> kOps = {DDL_SUM, DDL_MEAN, DDL_MIN, DDL_MAX, DDL_PRODUCT};
const std::vector<size_t> kCounts = {0, 1, 1009, kSanitized ? size_t{9001} : size_t{70'001}};

// A collective on buffers of `count` elements.
struct Case {
  ddl_kind kind = DDL_ALL_REDUCE;
  ddl_dtype dtype = DDL_FLOAT32;
  ddl_op op = DDL_SUM;
  std::vector<size_t> counts = {1009};
  bool in_place = false;
  bool library = false;  // for the device's library: values whose sums are exact in every order
  int root = 0;
  uint32_t flags = 0;
  uint32_t compression = 0;
  size_t rows = 0, row_count = 1;
  std::vector<int64_t> splits = {};
  size_t result_rows = 0;  // DDL_ALL_GATHER, DDL_ALL_TO_ALL
  bool first_on_host = false;

  size_t element() const { return ddl::DtypeSize(dtype); }
  bool free_rows() const { return kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL; }
  std::string Name() const {
    std::string name = std::string(ddl::KindName(kind)) + " " + ddl::DtypeName(dtype) + " " + ddl::OpName(op);
    for (const size_t count : counts) name += " " + std::to_string(count);
    return name + " flags " + std::to_string(flags) + (in_place ? " in place" : "");
  }
  Bytes Input(int rank, size_t buffer) const {
    const uint64_t seed = static_cast<uint64_t>(rank) * 100 + buffer;
    Bytes bytes = RandomElements(dtype, counts[buffer], seed);
    if (!library) return bytes;
    // Zeros and ones.
    ddl::FillNeutral(dtype, DDL_PRODUCT, bytes.data(), counts[buffer]);
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

void Describe(Call& call, const Case& c) {
  call.Dtype(c.dtype).Op(c.op).Root(c.root).Flags(c.flags).Rows(c.rows, c.row_count);
  call.request.compression = c.compression;
  call.request.tolerance = 1e9;
  if (c.kind == DDL_ALL_TO_ALL) call.Splits(c.splits);
}

// A rank's results of a case, one after another.
struct Result {
  Outcome outcome;
  Bytes bytes;
};

Result OnHost(ddl_comm* comm, const Case& c, int rank, const std::string& name) {
  Call call(c.kind, name);
  Describe(call, c);
  std::vector<Bytes> ins, outs;
  for (size_t i = 0; i < c.counts.size(); ++i) {
    ins.push_back(c.Input(rank, i));
    outs.emplace_back(c.OutCount(i, rank, ddl_size(comm)) * c.element(), 0xa5);
    if (c.in_place) outs.back() = ins.back();
  }
  for (size_t i = 0; i < c.counts.size(); ++i) {
    call.Buffer(c.in_place ? outs[i].data() : ins[i].data(), c.free_rows() ? nullptr : outs[i].data(), c.counts[i]);
  }
  Result result;
  ddl_work* const work = call.Start(comm);
  EXPECT_EQ(ddl_work_wait(work, 60'000), 1);
  if (c.free_rows() && ddl_work_failure(work) == nullptr && !outs[0].empty()) {
    std::memcpy(outs[0].data(), ddl_work_data(work), outs[0].size());
  }
  result.outcome = Call::Finish(work);
  for (const Bytes& out : outs) result.bytes.insert(result.bytes.end(), out.begin(), out.end());
  return result;
}

// Runs the same on a device, in two steps, between which other collectives may be started.
class OnDevice {
 public:
  OnDevice(ddl_comm* comm, Gpu& gpu, const Case& c, int rank, const std::string& name, bool result_on_host = false)
      : gpu_(gpu), case_(c), call_(c.kind, name), result_on_host_(result_on_host) {
    Describe(call_, c);
    for (size_t i = 0; i < c.counts.size(); ++i) {
      ins_.push_back(c.Input(rank, i));
      out_bytes_.push_back(c.OutCount(i, rank, ddl_size(comm)) * c.element());
    }
    for (size_t i = 0; i < c.counts.size(); ++i) {
      if (i == 0 && c.first_on_host) {
        host_out_.resize(out_bytes_[0]);
        outs_.push_back(host_out_.data());
        call_.Buffer(ins_[0].data(), host_out_.data(), c.counts[0]);
        continue;
      }
      void* const in = gpu.Allocate(ins_[i].size());
      outs_.push_back(c.in_place ? in : gpu.Allocate(out_bytes_[i]));
      gpu.Write(in, ins_[i]);
      call_.On(gpu.location(), gpu.stream());
      call_.Buffer(in, c.free_rows() ? nullptr : outs_[i], c.counts[i]);
    }
    place_ = {outs_[0], c.row_count, c.result_rows};
    if (c.free_rows() && !result_on_host) {
      call_.request.allocate = ddl_allocate_in_place;
      call_.request.user = &place_;
    }
    work_ = call_.Start(comm);
  }
  Result Finish() {
    Result result;
    EXPECT_EQ(ddl_work_wait(work_, 60'000), 1);
    if (result_on_host_ && ddl_work_failure(work_) == nullptr) {
      const auto* const data = static_cast<const uint8_t*>(ddl_work_data(work_));
      result.bytes.assign(data, data + out_bytes_[0]);
    }
    result.outcome = Call::Finish(work_);
    gpu_.Synchronize();  // waits for the inputs
    for (size_t i = 0; i < outs_.size() && !result_on_host_; ++i) {
      const Bytes part = i == 0 && case_.first_on_host ? host_out_ : gpu_.Read(outs_[i], out_bytes_[i]);
      result.bytes.insert(result.bytes.end(), part.begin(), part.end());
    }
    return result;
  }

 private:
  Gpu& gpu_;
  const Case case_;
  Call call_;
  const bool result_on_host_;
  std::vector<Bytes> ins_;
  std::vector<void*> outs_;
  std::vector<size_t> out_bytes_;
  Bytes host_out_;
  ddl_place place_{};
  ddl_work* work_ = nullptr;
};

// Checks that the case gives bit-identical results on the device and on the host.
void ExpectSame(ddl_comm* comm, Gpu& gpu, const Case& c, int rank, bool result_on_host = false) {
  const Result expected = OnHost(comm, c, rank, "on host");
  const Result received = OnDevice(comm, gpu, c, rank, "on device", result_on_host).Finish();
  ASSERT_EQ(expected.outcome.code, DDL_OK) << expected.outcome.message;
  ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
  ASSERT_TRUE(received.bytes == expected.bytes) << c.Name() << " on rank " << rank;
}

// Checks several concurrent cases, which rank 0 started in order and the other ranks in reverse.
void ExpectAllSame(ddl_comm* comm, const std::vector<Case>& cases,
                   const std::vector<std::unique_ptr<OnDevice>>& running, int rank) {
  for (size_t i = 0; i < cases.size(); ++i) {
    const Result received = running[rank == 0 ? i : cases.size() - 1 - i]->Finish();
    ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
    ASSERT_TRUE(received.bytes == OnHost(comm, cases[i], rank, "on host").bytes) << i;
  }
}

ddl_counters CountersOf(ddl_comm* comm) {
  ddl_counters counters{};
  ddl_count(comm, &counters);
  return counters;
}

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

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
  static void RunOnDevices(const std::vector<int>& group, uint32_t mode,
                           const std::function<void(ddl_comm*, Gpu&, int rank)>& body, RunOptions options = {}) {
    RunRanks(
        group,
        [&](ddl_comm* comm, int rank) {
          Gpu gpu(DeviceOf(rank));
          const Outcome added = AddDevice(comm, DeviceOf(rank), mode);
          ASSERT_EQ(added.code, DDL_OK) << added.message;
          body(comm, gpu, rank);
        },
        options);
  }
};

#define SKIP_WITHOUT_STAND_IN() \
  if (!HasStandIn()) GTEST_SKIP() << "needs the stand-ins"

const std::vector<std::vector<int>> kGroups = {{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 2, 2}};

std::vector<Case> Reductions(int size, bool library) {
  std::vector<Case> cases;
  for (const ddl_dtype dtype : kDtypes) {
    for (const ddl_op op : kOps) {
      for (const size_t count : kCounts) {
        Case c;
        c.dtype = dtype;
        c.op = op;
        c.library = library;
        c.counts = {count};
        c.in_place = count % 2 == 1;
        cases.push_back(c);
      }
      Case several;
      several.dtype = dtype;
      several.op = op;
      several.library = library;
      several.counts = {7, 0, 1009, 64};
      cases.push_back(several);
      for (const size_t rows : {size_t{0}, size_t{5}, static_cast<size_t>(4 * size)}) {
        Case scatter;
        scatter.kind = DDL_REDUCE_SCATTER;
        scatter.dtype = dtype;
        scatter.op = op;
        scatter.library = library;
        scatter.rows = rows;
        scatter.row_count = 13;
        scatter.counts = {rows * 13};
        cases.push_back(scatter);
      }
    }
  }
  return cases;
}

std::vector<Case> Moves(int size, int rank) {
  std::vector<Case> cases;
  for (int root = 0; root < size; ++root) {
    Case c;
    c.kind = DDL_BROADCAST;
    c.root = root;
    c.counts = {1009, 3};
    c.in_place = root % 2 == 1;
    cases.push_back(c);
  }
  for (const bool even : {true, false}) {
    Case c;
    c.kind = DDL_ALL_GATHER;
    c.dtype = DDL_INT64;
    c.row_count = 3;
    c.rows = even ? 5 : static_cast<size_t>(rank) * 2;
    c.result_rows = static_cast<size_t>(even ? 5 * size : size * (size - 1));
    c.counts = {c.rows * 3};
    cases.push_back(c);
  }
  Case exchange;
  exchange.kind = DDL_ALL_TO_ALL;
  exchange.row_count = 2;
  for (int other = 0; other < size; ++other) exchange.splits.push_back(rank + other);
  for (const int64_t split : exchange.splits) exchange.rows += static_cast<size_t>(split);
  exchange.result_rows = exchange.rows;
  exchange.counts = {exchange.rows * 2};
  cases.push_back(exchange);
  return cases;
}

TEST_F(DeviceTest, StagedResultsEqualTheHostsBitForBit) {
  for (const auto& group : kGroups) {
    const int size = static_cast<int>(group.size());
    RunOnDevices(group, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      for (const Case& c : Reductions(size, false)) ExpectSame(comm, gpu, c, rank);
      for (const Case& c : Moves(size, rank)) {
        ExpectSame(comm, gpu, c, rank);
        if (c.free_rows()) ExpectSame(comm, gpu, c, rank, true);
      }
      EXPECT_GT(CountersOf(comm).staged, 0u);
      EXPECT_EQ(CountersOf(comm).by_device, 0u);
    });
  }
}

TEST_F(DeviceTest, StagedSupportsFlagsCompressionAndMixedBuffers) {
  for (const auto& group : {std::vector<int>{0, 1}, std::vector<int>{0, 0, 2}}) {
    RunOnDevices(group, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      for (const uint32_t flags : {DDL_FLAG_PLAIN_MPI, DDL_FLAG_CHECK, DDL_FLAG_ALL_RANKS, DDL_FLAG_BLOCKING}) {
        Case c;
        c.flags = flags;
        c.library = true;
        ExpectSame(comm, gpu, c, rank);
      }
      for (const uint32_t compression : {DDL_COMPRESSION_BFLOAT16, DDL_COMPRESSION_FLOAT16}) {
        Case c;
        c.compression = compression;
        c.counts = {5000, 77};
        ExpectSame(comm, gpu, c, rank);
      }
      Case adaptive;
      adaptive.op = DDL_ADASUM;
      adaptive.library = true;
      adaptive.counts = {100, 33};
      ExpectSame(comm, gpu, adaptive, rank);
      Case both;
      both.counts = {1009, 2048};
      both.first_on_host = true;
      ExpectSame(comm, gpu, both, rank);
    });
  }
}

TEST_F(DeviceTest, StagedRunsManyRequestsAndMoreThanTheStagingMemory) {
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    std::vector<Case> cases(24);
    std::vector<std::unique_ptr<OnDevice>> running;
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[i].counts = {i == 5 ? size_t{kSanitized ? 1'000'003 : 5'000'011} : 1000 * i + 1};
      cases[i].in_place = i % 2 == 0;
    }
    // Ranks start them in different orders.
    for (size_t i = 0; i < cases.size(); ++i) {
      const size_t at = rank == 0 ? i : cases.size() - 1 - i;
      running.push_back(std::make_unique<OnDevice>(comm, gpu, cases[at], rank, "bucket " + std::to_string(at)));
    }
    ExpectAllSame(comm, cases, running, rank);
  });
}

TEST_F(DeviceTest, PlannedRequestsAreStagedUnlessTheLibraryRunsThem) {
  for (const uint32_t mode : {DDL_DEVICE_STAGED, DDL_DEVICE_AUTO}) {
    const uint64_t by_library = HasStandIn() && mode == DDL_DEVICE_AUTO ? 10 : 0;
    RunOptions options;
    options.lane = true;
    RunOnDevices(
        {0, 0}, mode,
        [&](ddl_comm* comm, Gpu& gpu, int rank) {
          for (uint64_t run = 1; run <= 5; ++run) {
            for (uint32_t index = 0; index < 2; ++index) {
              Case c;
              c.library = true;
              const Bytes in = c.Input(rank, 0);
              void* const data = gpu.Allocate(in.size());
              gpu.Write(data, in);
              Call call(DDL_ALL_REDUCE, "planned " + std::to_string(index));
              call.On(gpu.location(), gpu.stream()).Buffer(data, data, c.counts[0]);
              call.request.plan = 77;
              call.request.plan_run = run;
              call.request.plan_index = index;
              call.request.plan_size = 2;
              const Outcome outcome = call.Run(comm);
              ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
              ASSERT_TRUE(gpu.Read(data, in.size()) == OnHost(comm, c, rank, "on host").bytes);
            }
          }
          EXPECT_EQ(CountersOf(comm).by_device, by_library);
          EXPECT_EQ(CountersOf(comm).planned, 10 - by_library);
          EXPECT_EQ(CountersOf(comm).staged, 10 - by_library);
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
    RunOnDevices({0, 0}, mode, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      Place place{gpu};
      const Bytes in = c.Input(rank, 0);
      void* const data = gpu.Allocate(in.size());
      gpu.Write(data, in);
      Call call(c.kind, "late");
      Describe(call, c);
      call.On(gpu.location(), gpu.stream()).Buffer(data, nullptr, 5);
      call.request.user = &place;
      call.request.allocate = [](void* user, const uint64_t*, int) {
        Place& result = *static_cast<Place*>(user);
        const Gpu context(result.gpu.location().id);  // of this thread
        for (int use = 0; use < 20; ++use) result.gpu.Write(result.memory, result.used);
        return result.memory;
      };
      const Outcome outcome = call.Run(comm);
      ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
      gpu.Synchronize();
      EXPECT_TRUE(gpu.Read(place.memory, 40) == OnHost(comm, c, rank, "on host").bytes) << mode;
    });
  }
}

TEST_F(DeviceTest, JoinedRanksCountAsZeros) {
  for (const uint32_t mode : {DDL_DEVICE_STAGED, DDL_DEVICE_AUTO}) {
    RunOnDevices({0, 0, 0}, mode, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      Case c;
      c.library = true;
      if (rank < 2) {
        // On host memory, too, a joined rank counts as zeros.
        const Result expected = OnHost(comm, c, rank, "on host");
        const Result received = OnDevice(comm, gpu, c, rank, "on device").Finish();
        ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
        EXPECT_TRUE(received.bytes == expected.bytes);
      }
      int32_t last = -1;
      ASSERT_EQ(Call(DDL_JOIN, "").Buffer(nullptr, &last, 1).Run(comm).code, DDL_OK);
    });
  }
}

TEST_F(DeviceTest, OneRankMayHaveItsDataOnTheHost) {
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    Case c;
    const Result expected = OnHost(comm, c, rank, "sum");
    const Result received = rank == 0 ? OnDevice(comm, gpu, c, rank, "sum").Finish() : OnHost(comm, c, rank, "sum");
    ASSERT_EQ(received.outcome.code, DDL_OK) << received.outcome.message;
    EXPECT_TRUE(received.bytes == expected.bytes);
  });
}

TEST_F(DeviceTest, RefusesMemoryOfOtherDevices) {
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    Gpu gpu(DeviceOf(rank));
    void* const data = gpu.Allocate(4);
    const auto sum = [&](const ddl_location& location) {
      return Call(DDL_ALL_REDUCE, "sum").On(location, nullptr).Buffer(data, data, 1).Run(comm);
    };
    EXPECT_EQ(sum(gpu.location()).code, DDL_INVALID_ARGUMENT);
    EXPECT_TRUE(Contains(sum(gpu.location()).message, "(it has none)"));
    ASSERT_EQ(AddDevice(comm, DeviceOf(rank), DDL_DEVICE_STAGED).code, DDL_OK);
    const Outcome elsewhere = sum({DDL_CUDA, DeviceOf(rank) + 1});
    EXPECT_EQ(elsewhere.code, DDL_INVALID_ARGUMENT);
    EXPECT_TRUE(Contains(elsewhere.message, "Received: cuda:" + std::to_string(DeviceOf(rank) + 1)))
        << elsewhere.message;
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
    RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      Case c;
      const Bytes in = c.Input(rank, 0);
      void* const data = gpu.Allocate(in.size());
      ASSERT_EQ(Call(DDL_BARRIER, "before").Run(comm).code, DDL_OK);
      if (rank == 0) FailNext(function, 0, 1);
      Call call(DDL_ALL_REDUCE, "sum");
      // Rank 1's data is on the host, so the failure is rank 0's.
      Bytes host = in;
      if (rank == 0) {
        call.On(gpu.location(), gpu.stream()).Buffer(data, data, c.counts[0]);
      } else {
        call.Buffer(host.data(), host.data(), c.counts[0]);
      }
      const Outcome outcome = call.Run(comm);
      if (rank == 1 && outcome.code == DDL_OK) return;  // it got rank 0's data before the failure
      EXPECT_EQ(outcome.code, rank == 0 ? DDL_INTERNAL : DDL_ABORTED) << function;
      EXPECT_TRUE(Contains(outcome.message, "injected by a test")) << function << ": " << outcome.message;
    });
    Heal();
  }
}

TEST_F(DeviceTest, WorksWithoutLockedMemory) {
  SKIP_WITHOUT_STAND_IN();
  FailNext("cuMemHostRegister_v2", 0, -1);
  const int64_t before = Alive("pageable");
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED,
               [&](ddl_comm* comm, Gpu& gpu, int rank) { ExpectSame(comm, gpu, Case(), rank); });
  EXPECT_GT(Alive("pageable"), before);
}

TEST_F(DeviceTest, AHangingDeviceFailsAtTheDeadline) {
  SKIP_WITHOUT_STAND_IN();
  RunOptions options;
  options.deadline_s = 0.5;
  std::atomic<int> ended{0};
  RunOnDevices(
      {0, 0}, DDL_DEVICE_STAGED,
      [&](ddl_comm* comm, Gpu& gpu, int rank) {
        void* const data = gpu.Allocate(4000);
        ASSERT_EQ(Call(DDL_BARRIER, "before").Run(comm).code, DDL_OK);
        Stall(true);
        const Outcome outcome =
            Call(DDL_ALL_REDUCE, "sum").On(gpu.location(), gpu.stream()).Buffer(data, data, 1000).Run(comm);
        EXPECT_EQ(outcome.code, DDL_DEADLINE_EXCEEDED) << outcome.message;
        EXPECT_TRUE(Contains(outcome.message, "its own device")) << outcome.message;
        if (++ended == 2) Stall(false);
        while (ended < 2) std::this_thread::yield();
        (void)rank;
      },
      options);
}

TEST_F(DeviceTest, MemoryOfAFailedRequestIsNotReusedWhileItsCopyRuns) {
  SKIP_WITHOUT_STAND_IN();
  RunOnDevices({0, 0}, DDL_DEVICE_STAGED, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    for (int round = 0; round < 24; ++round) {
      ASSERT_EQ(Call(DDL_BARRIER, "before").Run(comm).code, DDL_OK);
      Stall(true);
      void* const data = gpu.Allocate(4036);
      Call mismatch(DDL_ALL_REDUCE, "mismatch");
      mismatch.Op(rank == 0 ? DDL_SUM : DDL_MAX).On(gpu.location(), gpu.stream()).Buffer(data, data, 1009);
      EXPECT_EQ(mismatch.Run(comm).code, DDL_FAILED_PRECONDITION);
      Case move;
      move.kind = DDL_BROADCAST;
      if (rank == 0) {
        ASSERT_EQ(OnHost(comm, move, rank, "move").outcome.code, DDL_OK);
        continue;
      }
      OnDevice moved(comm, gpu, move, rank, "move");
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
      [&](ddl_comm* comm, Gpu& gpu, int rank) {
        ExpectSame(comm, gpu, Case(), rank);
        if (rank == 1) return;
        const Result result = OnDevice(comm, gpu, Case(), rank, "alone").Finish();
        EXPECT_EQ(result.outcome.code, DDL_UNAVAILABLE);
        EXPECT_TRUE(Contains(result.outcome.message, "rank 1")) << result.outcome.message;
      },
      options);
}

// ---- the device's library

TEST_F(DeviceTest, TheLibraryRunsOnOneRank) {
  RunOnDevices({0}, DDL_DEVICE_LIBRARY, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    for (const Case& c : Reductions(1, true)) ExpectSame(comm, gpu, c, rank);
    for (const Case& c : Moves(1, rank)) ExpectSame(comm, gpu, c, rank);
    EXPECT_GT(CountersOf(comm).by_device, 0u);
  });
}

TEST_F(DeviceTest, TheLibraryGivesTheHostsResults) {
  SKIP_WITHOUT_STAND_IN();
  for (const int size : {2, 3}) {
    RunOnDevices(AllTogether(size), DDL_DEVICE_AUTO, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      uint64_t expected = 0;
      for (Case c : Reductions(size, true)) {
        // A third is not exact in floating point.
        if (size == 3 && c.op == DDL_MEAN) c.op = DDL_SUM;
        ExpectSame(comm, gpu, c, rank);
        if (testing::Test::HasFatalFailure()) return;
        const bool integer_mean = c.op == DDL_MEAN && c.dtype >= DDL_INT32;
        expected += !integer_mean && c.rows % size == 0 ? 1 : 0;
      }
      EXPECT_EQ(CountersOf(comm).by_device, expected);
      for (const Case& c : Moves(size, rank)) ExpectSame(comm, gpu, c, rank);
      EXPECT_EQ(CountersOf(comm).by_device, expected + static_cast<uint64_t>(size) + 1);
    });
  }
}

TEST_F(DeviceTest, TheLibraryRunsWhatItSupportsAndTheHostTheRest) {
  SKIP_WITHOUT_STAND_IN();
  RunOnDevices({0, 0}, DDL_DEVICE_AUTO, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    std::vector<Case> cases(20);
    std::vector<std::unique_ptr<OnDevice>> running;
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[i].library = true;
      cases[i].op = i % 3 == 0 ? DDL_ADASUM : DDL_SUM;
      cases[i].counts = {100 * i + 1};
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const size_t at = rank == 0 ? i : cases.size() - 1 - i;
      running.push_back(std::make_unique<OnDevice>(comm, gpu, cases[at], rank, "bucket " + std::to_string(at)));
    }
    ExpectAllSame(comm, cases, running, rank);
    EXPECT_EQ(CountersOf(comm).by_device, 13u);
    EXPECT_EQ(CountersOf(comm).staged, 7u);
  });
}

TEST_F(DeviceTest, TheModeAndTheTopologyChooseTheLibrary) {
  const auto by_device = [](const std::vector<int>& group, uint32_t mode, bool own_devices) {
    std::atomic<uint64_t> count{0};
    std::atomic<int> refused{0};
    RunRanks(group, [&](ddl_comm* comm, int rank) {
      const int ordinal = own_devices ? rank : 0;
      Gpu gpu(ordinal);
      const Outcome added = AddDevice(comm, ordinal, mode);
      if (added.code != DDL_OK) {
        EXPECT_TRUE(Contains(added.message, "2 ranks have 1 device(s)")) << added.message;
        ++refused;
        return;
      }
      Case c;
      c.library = true;
      ExpectSame(comm, gpu, c, rank);
      count = CountersOf(comm).by_device;
    });
    return refused > 0 ? -1 : static_cast<int>(count);
  };
  EXPECT_EQ(by_device({0, 0}, DDL_DEVICE_AUTO, false), 0);
  EXPECT_EQ(by_device({0, 0}, DDL_DEVICE_LIBRARY, false), -1);
  SKIP_WITHOUT_STAND_IN();
  EXPECT_EQ(by_device({0, 0}, DDL_DEVICE_AUTO, true), 1);
  EXPECT_EQ(by_device({0, 0}, DDL_DEVICE_STAGED, true), 0);
  EXPECT_EQ(by_device({0, 1}, DDL_DEVICE_AUTO, true), 0);
  EXPECT_EQ(by_device({0, 1}, DDL_DEVICE_LIBRARY, true), 1);
}

TEST_F(DeviceTest, TheLibraryNeedsAllRanksDataOnDevices) {
  SKIP_WITHOUT_STAND_IN();
  RunOnDevices({0, 0}, DDL_DEVICE_AUTO, [&](ddl_comm* comm, Gpu& gpu, int rank) {
    const Result result =
        rank == 0 ? OnDevice(comm, gpu, Case(), rank, "sum").Finish() : OnHost(comm, Case(), rank, "sum");
    EXPECT_EQ(result.outcome.code, DDL_FAILED_PRECONDITION);
    EXPECT_TRUE(Contains(result.outcome.message, "of a device")) << result.outcome.message;
    ExpectSame(comm, gpu, Case(), rank);
  });
}

std::mutex warnings_mutex;
std::string warnings;

TEST_F(DeviceTest, ALibraryThatCannotConnectIsAbandonedByAllRanks) {
  SKIP_WITHOUT_STAND_IN();
  RunOptions options;
  options.warn = [](void*, const char* text) {
    const std::lock_guard<std::mutex> lock(warnings_mutex);
    warnings += text;
  };
  for (const char* const function : {"ncclCommInitRankConfig", "ncclAsync"}) {
    warnings.clear();
    FailNext(function);
    RunOnDevices(
        {0, 0}, DDL_DEVICE_AUTO,
        [&](ddl_comm* comm, Gpu& gpu, int rank) {
          Case c;
          c.library = true;
          for (int i = 0; i < 3; ++i) ExpectSame(comm, gpu, c, rank);
          EXPECT_EQ(CountersOf(comm).by_device, 0u);
        },
        options);
    EXPECT_TRUE(Contains(warnings, "as a test asked for")) << warnings;
    EXPECT_TRUE(Contains(warnings, "pass through the memory of the host")) << warnings;
    FailNext(function);
    RunOnDevices({0, 0}, DDL_DEVICE_LIBRARY, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      const Result result = OnDevice(comm, gpu, Case(), rank, "sum").Finish();
      EXPECT_NE(result.outcome.code, DDL_OK);
      EXPECT_TRUE(Contains(result.outcome.message, "connect")) << result.outcome.message;
    });
    Heal();
  }
  FailNext("ncclGetUniqueId");
  RunRanks({0, 0}, [](ddl_comm* comm, int rank) {
    const Outcome added = AddDevice(comm, DeviceOf(rank), DDL_DEVICE_AUTO);
    EXPECT_EQ(added.code, DDL_INTERNAL) << added.message;
  });
}

TEST_F(DeviceTest, ALibraryFailureFailsTheCollectiveOnAllRanks) {
  SKIP_WITHOUT_STAND_IN();
  for (const char* const function : {"ncclAllReduce", "ncclGroupEnd", "ncclAsync"}) {
    std::atomic<int> ended{0};
    RunOnDevices({0, 0}, DDL_DEVICE_AUTO, [&](ddl_comm* comm, Gpu& gpu, int rank) {
      Case c;
      c.library = true;
      ExpectSame(comm, gpu, c, rank);
      ASSERT_EQ(Call(DDL_BARRIER, "before").Run(comm).code, DDL_OK);
      if (rank == 0) FailNext(function);
      ASSERT_EQ(Call(DDL_BARRIER, "now").Run(comm).code, DDL_OK);
      const auto begun = std::chrono::steady_clock::now();
      const Result result = OnDevice(comm, gpu, c, rank, "sum").Finish();
      EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
      // A rank that finished its part before the failure learns of it in the next collective.
      Outcome outcome = result.outcome;
      if (outcome.code == DDL_OK) outcome = Call(DDL_BARRIER, "after").Run(comm);
      EXPECT_NE(outcome.code, DDL_OK) << function;
      EXPECT_TRUE(Contains(outcome.message, "as a test asked for")) << function << outcome.message;
      ++ended;
    });
    EXPECT_EQ(ended, 2);
    Heal();
  }
}

// Rank 1 closes while the other ranks are in a collective of the library with it.
TEST_F(DeviceTest, ALostRankEndsALibraryCollective) {
  SKIP_WITHOUT_STAND_IN();
  RunOptions options;
  options.leave_early = {1};
  static std::atomic<int> runs;
  static int (*run)(void*, const ddl_device_collective*, void*);
  static int (*poll)(void*, int*);
  runs = 0;
  RunRanks(
      AllTogether(3),
      [&](ddl_comm* comm, int rank) {
        Gpu gpu(rank);
        const auto tweak = [rank](ddl_device& device) {
          if (rank != 1) return;
          run = device.run;
          poll = device.poll;
          // The second one never starts on this rank, and so never ends.
          device.run = [](void* self, const ddl_device_collective* collective, void* after) {
            return runs++ == 0 ? run(self, collective, after) : static_cast<int>(DDL_OK);
          };
          device.poll = [](void* self, int* ready) {
            const int code = poll(self, ready);
            if (runs > 1) *ready = 0;
            return code;
          };
        };
        ASSERT_EQ(AddDevice(comm, rank, DDL_DEVICE_AUTO, tweak).code, DDL_OK);
        Case c;
        c.library = true;
        ExpectSame(comm, gpu, c, rank);
        const auto begun = std::chrono::steady_clock::now();
        OnDevice last(comm, gpu, c, rank, "last");
        if (rank == 1) {
          while (runs < 2) std::this_thread::yield();
          ddl_close(comm);
        }
        const Outcome outcome = last.Finish().outcome;
        EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(15));
        EXPECT_EQ(outcome.code, rank == 1 ? DDL_NOT_FOUND : DDL_UNAVAILABLE) << outcome.message;
        if (rank == 1) return;
        EXPECT_TRUE(Contains(outcome.message, "rank 1 has left during a collective")) << outcome.message;
      },
      options);
}

}  // namespace
}  // namespace ddl_test
