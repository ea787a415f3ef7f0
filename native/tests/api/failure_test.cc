// Failures with fields, sent between ranks and looked up by number for bindings that can only pass text.
#include "base/failure.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "control/message.h"
#include "thread_group.h"

namespace ddl_test {
namespace {

using Roles = std::map<int, uint32_t>;

Outcome OutcomeOf(const ddl::Status& status) {
  const ddl_failure failure = ddl::FailureOf(status, "a name");
  return ddl_test::OutcomeOf(&failure);
}

const ddl::FailedRanks kRanks = {{4, DDL_RANK_SILENT}, {5, DDL_RANK_SILENT}, {6, DDL_RANK_SILENT},
                                 {1, DDL_RANK_DIED},   {2, DDL_RANK_LEFT},   {7, DDL_RANK_NAMED}};

TEST(ReasonTest, KeepsItsFieldsWhateverTheMessageSays) {
  for (const char* message : {"", "rank 9 died", "1:2-3,\x1fmore", "gr\xc3\xb6\xc3\x9f"}) {
    for (const ddl_code code : {DDL_ABORTED, DDL_UNAVAILABLE, DDL_DEADLINE_EXCEEDED, DDL_INTERNAL}) {
      const Outcome sent = OutcomeOf(ddl::Status(code, message, kRanks));
      const Outcome got = OutcomeOf(ddl::DecodeReason(ddl::EncodeReason({code, message, kRanks}, 1023)));
      EXPECT_EQ(got.code, code == DDL_INTERNAL ? DDL_ABORTED : code);
      EXPECT_EQ(got.message, message);
      EXPECT_EQ(got.roles, sent.roles);
    }
  }
  EXPECT_TRUE(OutcomeOf(ddl::DecodeReason(ddl::EncodeReason({DDL_ABORTED, "why"}, 1023))).roles.empty());
}

TEST(ReasonTest, OmitsRanksThatDoNotFit) {
  ddl::FailedRanks many;
  for (int32_t rank = 0; rank < 5000; ++rank) many.push_back({rank, DDL_RANK_SILENT});
  const ddl::Status one_host(DDL_ABORTED, std::string(3000, 'x'), many);
  const std::string reason = ddl::EncodeReason(one_host, 1023);
  EXPECT_LE(reason.size(), 1023u);
  EXPECT_EQ(OutcomeOf(ddl::DecodeReason(reason)).roles.size(), many.size());
  for (ddl_failed_rank& each : many) each.rank *= 2;  // no two are consecutive
  const Outcome some = OutcomeOf(ddl::DecodeReason(ddl::EncodeReason({DDL_ABORTED, "why", many}, 1023)));
  EXPECT_EQ(some.message, "why");
  EXPECT_GT(some.roles.size(), 20u);
  EXPECT_EQ(some.roles.rbegin()->first, 2 * (static_cast<int>(some.roles.size()) - 1));
}

TEST(DecisionTest, KeepsItsRanks) {
  ddl::Decision decision;
  decision.name = "a";
  decision.SetFailure({DDL_FAILED_PRECONDITION, "ranks disagree", kRanks});
  const ddl::Decision got = ddl::DecodeDecision(ddl::EncodeDecision(decision));
  EXPECT_EQ(got.status().message(), "ranks disagree");
  EXPECT_EQ(OutcomeOf(got.status()).roles, OutcomeOf(decision.status()).roles);
  EXPECT_EQ(got.name, "a");
}

uint64_t Keep(const std::string& message) {
  const ddl::Status status(DDL_ABORTED, message, kRanks);
  ddl_failure failure = ddl::FailureOf(status, "a name");
  failure.communicator = 7;
  return ddl_keep_failure(&failure);
}

TEST(KeptFailureTest, IsFoundByItsNumber) {
  const uint64_t number = Keep("why");
  const ddl_failure* const found = ddl_find_failure(number);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->communicator, 7);
  const Outcome outcome = ddl_test::OutcomeOf(found);
  EXPECT_EQ(outcome.code, DDL_ABORTED);
  EXPECT_EQ(outcome.message, "why");
  EXPECT_EQ(outcome.name, "a name");
  EXPECT_EQ(outcome.roles.size(), kRanks.size());
  for (const uint64_t other : {uint64_t{0}, number + 1, ~uint64_t{0}}) EXPECT_EQ(ddl_find_failure(other), nullptr);
  // A held failure stays, even if newer ones have replaced it.
  for (int i = 0; i < 4096; ++i) Keep("newer");
  EXPECT_EQ(ddl_find_failure(number), nullptr);
  EXPECT_STREQ(found->message, "why");
  ddl_release_failure(found);
}

TEST(KeptFailureTest, HasUniqueNumbersAcrossThreads) {
  std::vector<std::vector<uint64_t>> numbers(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < numbers.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const std::string message = std::to_string(t) + "/" + std::to_string(i);
        numbers[t].push_back(Keep(message));
        const ddl_failure* const found = ddl_find_failure(numbers[t].back());
        ASSERT_NE(found, nullptr);
        EXPECT_EQ(found->message, message);
        ddl_release_failure(found);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& each : numbers) all.insert(each.begin(), each.end());
  EXPECT_EQ(all.size(), 2000u);
}

}  // namespace
}  // namespace ddl_test
