// Submissions to the communication thread, and exclusive use of the group's memory.
#include "engine/submissions.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine_block.h"

namespace ddl_test {
namespace {

class SubmissionsTest : public testing::Test {
 protected:
  void SetUp() override {
    ddl_transport alone{};
    alone.size = 1;
    alone.all_gather = [](void*, const void* in, void* out, size_t bytes) {
      std::memcpy(out, in, bytes);
      return static_cast<int>(DDL_OK);
    };
    ASSERT_TRUE(ddl::GroupMemory::Create(alone, {0}, 4096, &memory_).ok());
    submissions_ = std::make_unique<ddl::Submissions>(*memory_);
  }
  std::unique_ptr<ddl::Request> Named(const std::string& name) {
    auto request = std::make_unique<ddl::Request>();
    request->announcement.name = name;
    request->user = &refused_;
    request->done = [](void* user, const ddl_failure* failure) {
      static_cast<std::vector<int>*>(user)->push_back(failure == nullptr ? DDL_OK : failure->code);
    };
    return request;
  }
  std::vector<std::string> Take() {
    std::vector<std::unique_ptr<ddl::Request>> requests;
    EXPECT_TRUE(submissions_->Take(&requests, &failure_));
    std::vector<std::string> names;
    for (const auto& request : requests) names.push_back(request->is_marker() ? "marker" : request->announcement.name);
    return names;
  }
  std::unique_ptr<ddl::GroupMemory> memory_;
  std::unique_ptr<ddl::Submissions> submissions_;
  ddl::Status failure_;
  std::vector<int> refused_;
};

TEST_F(SubmissionsTest, AreTakenOnceInOrderWithMarkersBetween) {
  submissions_->Submit(Named("a"));
  submissions_->SubmitMarker(std::make_unique<ddl::Request>(), false);
  submissions_->Submit(Named("b"));
  EXPECT_EQ(Take(), (std::vector<std::string>{"a", "marker", "b"}));
  EXPECT_EQ(Take(), std::vector<std::string>{});
}

TEST_F(SubmissionsTest, FromManyThreadsAllArrive) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 100; ++i) submissions_->Submit(Named(std::to_string(100 * t + i)));
    });
  }
  std::multiset<std::string> arrived;
  while (arrived.size() < 400) {
    for (const std::string& name : Take()) arrived.insert(name);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<std::string>(arrived.begin(), arrived.end()).size(), 400u);
}

TEST_F(SubmissionsTest, ACallingThreadEntersOnlyWhileNothingIsOutstanding) {
  EXPECT_TRUE(submissions_->Enter());
  EXPECT_FALSE(submissions_->Enter());
  submissions_->Leave({});
  submissions_->Submit(Named("a"));
  EXPECT_FALSE(submissions_->Enter());
  EXPECT_TRUE(submissions_->HasOutstanding());
  (void)Take();
  EXPECT_FALSE(submissions_->Enter()) << "taken is not ended";
  submissions_->CountEnded();
  EXPECT_FALSE(submissions_->HasOutstanding());
  EXPECT_TRUE(submissions_->Enter());
}

TEST_F(SubmissionsTest, NothingIsTakenWhileACallingThreadIsInside) {
  ASSERT_TRUE(submissions_->Enter());
  submissions_->Submit(Named("a"));
  std::vector<std::unique_ptr<ddl::Request>> requests;
  EXPECT_FALSE(submissions_->Take(&requests, &failure_));
  EXPECT_TRUE(submissions_->IsInside());
  submissions_->Leave({});
  EXPECT_EQ(Take(), std::vector<std::string>{"a"});
}

TEST_F(SubmissionsTest, AFailureInsideIsTakenOnceAndNoThreadEntersAgain) {
  ASSERT_TRUE(submissions_->Enter());
  submissions_->Leave({DDL_ABORTED, "out of step"});
  EXPECT_FALSE(submissions_->Enter());
  (void)Take();
  EXPECT_EQ(failure_.code(), DDL_ABORTED);
  (void)Take();
  EXPECT_TRUE(failure_.ok());
}

TEST_F(SubmissionsTest, NoThreadEntersWhileRankZeroForbidsIt) {
  ddl::OwnBlock(*memory_).no_rendezvous = 1;
  EXPECT_FALSE(submissions_->Enter());
  ddl::OwnBlock(*memory_).no_rendezvous = 0;
  EXPECT_TRUE(submissions_->Enter());
}

TEST_F(SubmissionsTest, AfterStopRequestsAreRefusedAndMarkersDropped) {
  EXPECT_EQ(submissions_->seconds_stopped(), 0);
  submissions_->Stop();
  submissions_->Submit(Named("late"));
  submissions_->SubmitMarker(std::make_unique<ddl::Request>(), true);
  EXPECT_EQ(refused_, std::vector<int>{DDL_NOT_FOUND});
  EXPECT_EQ(Take(), std::vector<std::string>{});
  EXPECT_FALSE(submissions_->Enter());
  EXPECT_FALSE(submissions_->HasOutstanding());
  EXPECT_GE(submissions_->seconds_stopped(), 0);
}

}  // namespace
}  // namespace ddl_test
