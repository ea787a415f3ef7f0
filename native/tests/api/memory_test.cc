// Memory shortage in calls of ddl.h: each allocation of the calling thread fails once. The call throws nothing,
// reports the shortage as ddl.h says, and the communicator works afterwards.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>

#include "several_groups.h"
#include "thread_group.h"

namespace {

// Number of allocations of this thread that succeed before one fails; negative: all succeed.
thread_local int allocations_left = -1;

void* Allocate(size_t bytes) {
  if (allocations_left == 0) {
    allocations_left = -1;
    return nullptr;
  }
  if (allocations_left > 0) --allocations_left;
  return std::malloc(bytes == 0 ? 1 : bytes);
}

void* AllocateOrThrow(size_t bytes) {
  void* const memory = Allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined, or GCC sees malloc and free instead of a new and its delete, and warns.
[[gnu::noinline]] void* operator new(size_t bytes) { return AllocateOrThrow(bytes); }
[[gnu::noinline]] void* operator new[](size_t bytes) { return AllocateOrThrow(bytes); }
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
[[gnu::noinline]] void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace ddl_test {
namespace {

// Names that are too long for std::string's inline buffer, and so are their messages.
constexpr char kName[] = "a collective with a name of some length";
constexpr char kLabel[] = "a label that is longer than what a string keeps inline";

// Repeats `call`: first with the first allocation failing, then the second, until none fails. Returns the failures.
int WithEachAllocationFailing(const std::function<void(bool failed)>& check, const std::function<void()>& call) {
  for (int n = 0; n < 1000; ++n) {
    allocations_left = n;
    EXPECT_NO_THROW(call()) << "allocation " << n;
    const bool failed = allocations_left < 0;
    allocations_left = -1;
    check(failed);
    if (!failed) return n;
  }
  ADD_FAILURE() << "more than a thousand allocations";
  return -1;
}

class MemoryTest : public testing::Test {
 protected:
  MemoryTest() {
    const int32_t leader = 0;
    ddl_options options{};
    options.abi_version = DDL_ABI_VERSION;
    options.group = &leader;
    comm_ = ddl_create(nullptr, &options, text_, sizeof text_);
    EXPECT_NE(comm_, nullptr) << text_;
    sum_.kind = DDL_ALL_REDUCE;
    sum_.num_buffers = 1;
    sum_.buffers = &buffer_;
    sum_.name = kName;
    sum_.detail = kLabel;
  }
  ~MemoryTest() override { ddl_destroy(comm_); }

  void ExpectWorks() {
    value_ = 3;
    EXPECT_EQ(Call(DDL_ALL_REDUCE, kName).Buffer(&value_, &value_, 1).Run(comm_).code, DDL_OK);
    EXPECT_EQ(value_, 3);
  }

  ddl_comm* comm_ = nullptr;
  char text_[1024] = "";
  float value_ = 1;
  const ddl_buffer buffer_{&value_, &value_, 1, {}};
  ddl_request sum_{};
};

TEST_F(MemoryTest, ShortageInSubmitEndsTheRequestOnce) {
  std::atomic<int> ends{0};
  std::atomic<int> code{DDL_OK};
  struct Ends {
    std::atomic<int>& ends;
    std::atomic<int>& code;
  } user{ends, code};
  sum_.user = &user;
  sum_.done = [](void* to, const ddl_failure* failure) {
    static_cast<Ends*>(to)->code = failure == nullptr ? 0 : failure->code;
    ++static_cast<Ends*>(to)->ends;
  };
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        while (ends == 0) usleep(100);
        ExpectWorks();
        EXPECT_EQ(ends.exchange(0), 1);
        EXPECT_EQ(code, failing ? DDL_INTERNAL : DDL_OK);
      },
      [&] { ddl_submit(comm_, &sum_); });
  EXPECT_GT(failed, 2);
}

TEST_F(MemoryTest, ShortageInStartIsTheOutcome) {
  ddl_work* work = nullptr;
  int none = 0;
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        if (work == nullptr) {
          ++none;
        } else {
          const Outcome outcome = Call::Finish(work);
          EXPECT_EQ(outcome.code, failing ? DDL_INTERNAL : DDL_OK);
          EXPECT_EQ(outcome.message, failing ? "out of memory" : "");
        }
        ExpectWorks();
      },
      [&] { work = ddl_start(comm_, &sum_); });
  EXPECT_GT(failed, 2);
  EXPECT_EQ(none, 1);
}

TEST_F(MemoryTest, ShortageOnACallingThreadStrandsNoRank) {
  // Once the calling thread has begun, the other ranks depend on it. So the communicator fails with the shortage, and
  // submitting reports that.
  bool works = true;
  std::string reason;
  int ran = 0;
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        EXPECT_TRUE(failing ? ran == 0 || ran == 1 : ran == 1 || !works) << ran;
        const Outcome outcome = Call(DDL_ALL_REDUCE, kName).Buffer(&value_, &value_, 1).Run(comm_);
        works = works && outcome.code == DDL_OK;
        EXPECT_TRUE(works || Contains(outcome.message, "out of memory")) << outcome.message;
      },
      [&] { ran = ddl_try_run(comm_, &sum_, 1000); });
  EXPECT_GE(failed, 0);
}

TEST_F(MemoryTest, ShortageInAnAdaptiveSumOnACallingThreadFailsTheCommunicator) {
  sum_.op = DDL_ADASUM;  // always run by the executor, which allocates
  allocations_left = 0;
  EXPECT_NO_THROW(EXPECT_EQ(ddl_try_run(comm_, &sum_, 1000), 0));
  EXPECT_EQ(allocations_left, -1);
  const Outcome outcome = Call(DDL_ALL_REDUCE, kName).Buffer(&value_, &value_, 1).Run(comm_);
  EXPECT_EQ(outcome.code, DDL_INTERNAL);
  EXPECT_TRUE(Contains(outcome.message, "out of memory")) << outcome.message;
}

TEST_F(MemoryTest, ShortageInPublishPublishesNothing) {
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        ddl_comm* const found = ddl_find(7);
        EXPECT_EQ(found, failing ? nullptr : comm_);
        if (found != nullptr) ddl_release(found);
      },
      [&] { ddl_publish(7, comm_); });
  EXPECT_EQ(failed, 1);
  ddl_publish(7, nullptr);
}

TEST_F(MemoryTest, ShortageInReplyPositionIsHarmless) {
  const int failed = WithEachAllocationFailing([](bool) {}, [&] { ddl_reply_position(comm_, kLabel); });
  EXPECT_EQ(failed, 1);
  ExpectWorks();
}

TEST_F(MemoryTest, ShortageInTheTimelineFailsItOrOmitsASpan) {
  const std::string path = testing::TempDir() + "memory_test." + std::to_string(getpid());
  int code = DDL_OK;
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        EXPECT_EQ(code, failing ? DDL_INTERNAL : DDL_OK);
        EXPECT_STREQ(text_, failing ? "out of memory" : "");
      },
      [&] { code = ddl_trace_start(path.c_str(), 0, kLabel, text_, sizeof text_); });
  EXPECT_GT(failed, 2);
  EXPECT_GT(WithEachAllocationFailing([](bool) {}, [&] { ddl_trace_span(kLabel, 1, 2); }), 2);
  ExpectWorks();
  EXPECT_EQ(WithEachAllocationFailing([](bool) {}, [&] { code = ddl_trace_stop(text_, sizeof text_); }), 0);
  EXPECT_EQ(code, DDL_OK);
  std::string written;
  std::FILE* const file = std::fopen(path.c_str(), "r");
  ASSERT_NE(file, nullptr);
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) written += static_cast<char>(c);
  std::fclose(file);
  std::remove(path.c_str());
  // Only complete events: the three at the start, the span that had memory, and the sum's.
  size_t opened = 0;
  size_t closed = 0;
  for (const char c : written) {
    opened += c == '{' ? 1 : 0;
    closed += c == '}' ? 1 : 0;
  }
  EXPECT_EQ(opened, closed) << written;
  EXPECT_TRUE(Contains(written, kLabel));
}

TEST(CreationTest, ShortageLeavesNoCommunicator) {
  const int32_t leader = 0;
  ddl_options options{};
  options.abi_version = DDL_ABI_VERSION;
  options.group = &leader;
  char text[1024] = "";
  ddl_comm* comm = nullptr;
  const int failed = WithEachAllocationFailing(
      [&](bool failing) {
        EXPECT_TRUE(comm != nullptr || failing) << text;  // some calls need less memory
        if (comm != nullptr) ddl_destroy(comm);
      },
      [&] { comm = ddl_create(nullptr, &options, text, sizeof text); });
  EXPECT_GT(failed, 10);
}

}  // namespace
}  // namespace ddl_test
