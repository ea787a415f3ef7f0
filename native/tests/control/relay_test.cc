// One relay by itself: what it holds back, what it puts together, and in what order it goes on.
#include "control/relay.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "control/announced.h"

namespace ddl_test {
namespace {

using ddl::AlikeAnnouncements;
using ddl::Announcement;

// Ranks 2, 3 and 4, of which 2 leads; 0 and 1 are on another host.
class RelayTest : public testing::Test {
 protected:
  void Add(int rank, const Announcement& a, double now = 0) { relay.Add({{rank}, {a.step}, {a.rows}, 0, a}, now); }
  void AddKnown(int rank, uint32_t id, double now = 0) { relay.Add({{rank}, {7}, {}, id, {}}, now); }
  std::vector<AlikeAnnouncements> Taken() {
    std::vector<AlikeAnnouncements> all;
    for (const std::string& bytes : relay.TakeMessages()) all.push_back(ddl::DecodeAlike(bytes));
    return all;
  }
  static ddl::Decision Decided(const std::string& name, ddl_code code = DDL_OK) {
    ddl::Decision decision;
    decision.name = name;
    decision.code = code;
    return decision;
  }

  const ddl::ControlTree tree{{0, 0, 2, 2, 2}, 2, 1};
  ddl::Relay relay{tree};
};

TEST_F(RelayTest, SendsOneMessageWhenAllHaveCome) {
  Add(4, Bucket("a", 10));
  Add(2, Bucket("a", 30));
  relay.Tick(0.01);
  EXPECT_TRUE(Taken().empty());
  EXPECT_TRUE(relay.holds());
  Add(3, Bucket("a", 20));
  const auto sent = Taken();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].ranks, (std::vector<int>{2, 3, 4}));
  EXPECT_EQ(sent[0].steps, (std::vector<uint64_t>{30, 20, 10}));
  EXPECT_EQ(sent[0].announcement.detail, "float32[1000]");
  EXPECT_FALSE(relay.holds());
}

TEST_F(RelayTest, KeepsApartWhatDiffers) {
  Announcement other = Bucket("a", 1);
  other.count = 5;
  Announcement shown = Bucket("a", 1);
  shown.detail = "float32[10,100]";  // only in words: errors show those of the first
  Add(2, Bucket("a", 1));
  Add(3, other);
  Add(4, shown);
  const auto sent = Taken();
  ASSERT_EQ(sent.size(), 3u);
  EXPECT_EQ(sent[1].announcement.count, 5u);
  EXPECT_EQ(sent[2].announcement.detail, "float32[10,100]");
}

TEST_F(RelayTest, WhatDoesNotComeTogetherGoesOnAfterAMoment) {
  Add(2, Bucket("a", 0), 1.0);
  Add(4, Bucket("a", 0), 1.02);
  relay.Tick(1.04);
  EXPECT_TRUE(Taken().empty());
  relay.Tick(1.06);
  auto sent = Taken();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].ranks, (std::vector<int>{2, 4}));
  // Who is late is not held back again, and what is next is together again.
  Add(3, Bucket("a", 0), 9);
  sent = Taken();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].ranks, std::vector<int>{3});
  for (const int rank : {3, 4, 2}) Add(rank, Bucket("a", 0), 10);
  EXPECT_EQ(Taken().size(), 1u);
}

TEST_F(RelayTest, NobodyIsLateForWhatHasFailed) {
  Add(2, Bucket("a", 0), 1.0);
  relay.Tick(2);
  EXPECT_EQ(Taken().size(), 1u);
  relay.OnDecision(Decided("a", DDL_DEADLINE_EXCEEDED));
  for (const int rank : {3, 4}) Add(rank, Bucket("a", 0), 3);
  EXPECT_TRUE(Taken().empty());
  Add(2, Bucket("a", 0), 3);
  const auto sent = Taken();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].ranks.size(), 3u);
}

TEST_F(RelayTest, SeveralOfOneNameStayInOrder) {
  for (const uint64_t count : {1, 2, 3}) {
    Announcement a = Bucket("a", count);
    a.count = count;
    Add(3, a);
  }
  for (const int rank : {2, 4}) {
    for (const uint64_t count : {1, 2, 3}) {
      Announcement a = Bucket("a", count);
      a.count = count;
      Add(rank, a);
    }
  }
  const auto sent = Taken();
  ASSERT_EQ(sent.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(sent[i].announcement.count, i + 1);
}

TEST_F(RelayTest, ANumberStandsForTheName) {
  ddl::Decision gives = Decided("a");
  gives.id = 5;
  gives.gives_id = true;
  relay.OnDecision(gives);
  // One rank had not read the decision: the same name, and never before what it has announced earlier.
  Add(3, Bucket("a", 7));
  AddKnown(2, 5);
  AddKnown(4, 5);
  auto sent = Taken();
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].id, 5u);
  EXPECT_EQ(sent[0].ranks, (std::vector<int>{2, 4}));
  EXPECT_EQ(sent[1].id, 0u);
  ddl::Decision by_number;
  by_number.id = 5;
  relay.OnDecision(by_number);
  for (const int rank : {2, 3, 4}) AddKnown(rank, 5);
  ASSERT_EQ(Taken().size(), 1u);
}

TEST_F(RelayTest, AJoinOvertakesNothing) {
  Announcement join;
  join.kind = DDL_JOIN;
  Add(3, Bucket("a", 0));
  Add(3, join);
  auto sent = Taken();
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].announcement.name, "a");
  EXPECT_EQ(sent[1].announcement.kind, DDL_JOIN);
  for (const int rank : {2, 4}) Add(rank, Bucket("b", 0));
  EXPECT_EQ(Taken().size(), 1u);  // without rank 3
  relay.OnDecision(Decided(""));
  for (const int rank : {2, 4}) Add(rank, Bucket("c", 0));
  EXPECT_TRUE(Taken().empty());
}

}  // namespace
}  // namespace ddl_test
