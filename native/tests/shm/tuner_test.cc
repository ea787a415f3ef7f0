// The tuner on a machine whose times are made up.
#include "shm/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

namespace ddl_test {
namespace {

using ddl::Algorithm;
using ddl::CandidateSchemes;
using ddl::Scheme;
using ddl::Store;
using ddl::Tuner;

constexpr size_t kSlotBytes = 512 * 1024;
constexpr uint64_t kBytes = 1024 * 1024;

// Makes `calls` all-reduces whose seconds `cost` tells; returns how many used a scheme for which `wanted` is true.
int Drive(Tuner& tuner, int calls, double* now, uint64_t bytes, const std::function<double(const Scheme&)>& cost,
          const std::function<bool(const Scheme&)>& wanted) {
  int found = 0;
  for (int i = 0; i < calls; ++i) {
    const Scheme scheme = tuner.Choose(bytes);
    found += wanted(scheme) ? 1 : 0;
    const double seconds = cost(scheme);
    *now += seconds;
    tuner.Report(bytes, seconds, *now);
  }
  return found;
}

bool Streams(const Scheme& scheme) { return scheme.slot_store == Store::kStreaming; }
bool Caches(const Scheme& scheme) { return !Streams(scheme); }

TEST(SchemeTest, SurvivesItsCodeAndFitsIntoASlot) {
  for (const int ranks : {2, 3, 8}) {
    for (uint64_t bytes = 1; bytes <= uint64_t{1} << 30; bytes *= 2) {
      const auto candidates = CandidateSchemes(bytes, ranks, kSlotBytes / 8, true);
      ASSERT_FALSE(candidates.empty());
      EXPECT_EQ(candidates.size() == 1, bytes <= ddl::kUntunedBytes) << bytes;
      size_t cma = 0;
      for (const Scheme& scheme : candidates) {
        if (scheme.algorithm == Algorithm::kCma) {
          ++cma;
        } else {
          EXPECT_LE(scheme.chunk_bytes, kSlotBytes / 8);
        }
        const Scheme decoded = Scheme::Decode(scheme.Encode());
        EXPECT_EQ(decoded.Encode(), scheme.Encode());
        EXPECT_EQ(decoded.algorithm, scheme.algorithm);
        EXPECT_EQ(decoded.chunk_bytes, scheme.chunk_bytes);
      }
      EXPECT_EQ(cma > 0, bytes > ddl::kUntunedBytes) << bytes;
      // Where ranks do not reach each other's memory, the rest of them.
      EXPECT_EQ(CandidateSchemes(bytes, ranks, kSlotBytes / 8, false).size(), candidates.size() - cma);
    }
  }
}

TEST(TunerTest, SettlesOnTheFastestAndStays) {
  for (const bool streaming_wins : {false, true}) {
    Tuner tuner(2, kSlotBytes, true);
    double now = 0;
    const auto cost = [&](const Scheme& s) { return Streams(s) == streaming_wins ? 1e-4 : 3e-4; };
    const auto wanted = streaming_wins ? Streams : Caches;
    Drive(tuner, 200, &now, kBytes, cost, wanted);
    EXPECT_EQ(Drive(tuner, 1000, &now, kBytes, cost, wanted), 1000);
  }
}

TEST(TunerTest, TriesAgainWhenTheMachineChanges) {
  Tuner tuner(2, kSlotBytes, true);
  double now = 0;
  Drive(tuner, 2000, &now, kBytes, [](const Scheme& s) { return Streams(s) ? 3e-3 : 1e-3; }, Caches);
  const auto far = [](const Scheme& s) { return Streams(s) ? 1e-3 : 4e-3; };
  Drive(tuner, 300, &now, kBytes, far, Streams);
  EXPECT_EQ(Drive(tuner, 500, &now, kBytes, far, Streams), 500);
}

// The clock runs whether or not the program reduces: however rare its calls and restless the machine, few of them
// explore.
TEST(TunerTest, ExploresFewOfTheCallsHoweverRareTheyAre) {
  for (const bool restless : {false, true}) {
    for (const double pause : {0.0, 0.05, 1.0, 30.0}) {
      Tuner tuner(2, kSlotBytes, true);
      const uint64_t best = CandidateSchemes(kBytes, 2, kSlotBytes, true)[1].Encode();
      constexpr int kFirst = 200;  // more than it takes to choose
      constexpr int kCalls = 10'000;
      double now = 0;
      int others = 0;
      for (int call = 0; call < kFirst + kCalls; ++call) {
        const bool other = tuner.Choose(kBytes).Encode() != best;
        others += call >= kFirst && other ? 1 : 0;
        const double seconds = (other ? 8e-4 : 1e-4) * (restless && call / 400 % 2 == 1 ? 2 : 1);
        now += pause + seconds;
        tuner.Report(kBytes, seconds, now);
      }
      EXPECT_LE(others, kCalls / 50) << "a call in " << pause << " s";
      EXPECT_TRUE(pause == 0 || others > 0) << "never again: a call in " << pause << " s";
    }
  }
}

TEST(TunerTest, IsNotDeceivedByAHiccupInATrial) {
  Tuner tuner(2, kSlotBytes, true);
  double now = 0;
  int call = 0;
  // Every seventh call is held up, whatever its scheme.
  const auto cost = [&](const Scheme& s) { return ++call % 7 == 0 ? 5e-3 : (Streams(s) ? 1e-4 : 2e-4); };
  Drive(tuner, 200, &now, kBytes, cost, Streams);
  EXPECT_EQ(Drive(tuner, 20, &now, kBytes, cost, Streams), 20);
}

TEST(TunerTest, LearnsEachSizeByItselfAndLargeOnesTogether) {
  Tuner tuner(2, kSlotBytes, true);
  double now = 0;
  const auto small = [](const Scheme& s) { return Streams(s) ? 2e-4 : 1e-4; };
  const auto large = [](const Scheme& s) { return Streams(s) ? 1e-2 : 2e-2; };
  Drive(tuner, 200, &now, kBytes, small, Caches);
  Drive(tuner, 100, &now, 64 * kBytes, large, Streams);
  EXPECT_TRUE(Caches(tuner.Choose(kBytes)));
  EXPECT_TRUE(Streams(tuner.Choose(64 * kBytes)));
  EXPECT_TRUE(Streams(tuner.Choose(16 * kBytes)));
}

}  // namespace
}  // namespace ddl_test
