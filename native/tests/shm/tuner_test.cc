// The tuner with made-up times.
#include "shm/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <vector>

namespace ddl_test {
namespace {

using ddl::Algorithm;
using ddl::CandidateSchemes;
using ddl::Scheme;
using ddl::Store;
using ddl::Tuner;

constexpr size_t kSlotBytes = 512 * 1024;
constexpr uint64_t kBytes = 1024 * 1024;

struct Driven {
  double seconds;  // in total
  int wanted;      // calls that used a scheme for which `wanted` is true
};

// Simulates `calls` all-reduces whose times `cost` gives.
Driven Drive(Tuner& tuner, int calls, uint64_t bytes, const std::function<double(const Scheme&)>& cost,
             const std::function<bool(const Scheme&)>& wanted) {
  Driven driven{0, 0};
  for (int i = 0; i < calls; ++i) {
    const Scheme scheme = tuner.Choose(DDL_ALL_REDUCE, bytes);
    const double seconds = cost(scheme);
    driven.wanted += wanted(scheme) ? 1 : 0;
    driven.seconds += seconds;
    tuner.Report(DDL_ALL_REDUCE, scheme, bytes, seconds);
  }
  return driven;
}

// Times of a real machine. `rounds`: times of each scheme in turn, for `calls` calls each.
struct Recording {
  ddl_kind kind;
  int ranks;
  uint64_t bytes;
  size_t calls;
  std::vector<uint64_t> schemes;  // encoded
  std::vector<std::vector<uint32_t>> rounds;

  // Returns the seconds of a program's call number `call`, if it used this scheme and a round took this many calls.
  double Seconds(uint64_t scheme, size_t call, size_t calls_per_round) const {
    const auto i = static_cast<size_t>(std::find(schemes.begin(), schemes.end(), scheme) - schemes.begin());
    const auto& round = rounds.at(call / calls_per_round % rounds.size());
    return round.at(i * calls + call % calls) * 1e-9;
  }
};

#include "shm/recorded_times.inc"

bool Streams(const Scheme& scheme) { return scheme.slot_store == Store::kStreaming; }
bool Caches(const Scheme& scheme) { return !Streams(scheme); }

class SchemeTest : public testing::TestWithParam<ddl_kind> {};

TEST_P(SchemeTest, SurvivesEncodingAndFitsIntoASlot) {
  for (const int ranks : {2, 3, 8}) {
    for (uint64_t bytes = 1; bytes <= uint64_t{1} << 30; bytes *= 2) {
      const auto candidates = CandidateSchemes(GetParam(), bytes, ranks, kSlotBytes / 8, true);
      ASSERT_FALSE(candidates.empty());
      EXPECT_EQ(candidates.size() == 1, bytes <= ddl::UntunedBytes(GetParam())) << bytes;
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
      EXPECT_EQ(cma > 0, bytes > ddl::UntunedBytes(GetParam())) << bytes;
      // Without access to each other's memory, ranks can use the other schemes.
      EXPECT_EQ(CandidateSchemes(GetParam(), bytes, ranks, kSlotBytes / 8, false).size(), candidates.size() - cma);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SchemeTest, testing::Values(DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER));

TEST(TunerTest, SettlesOnTheFastestAndStays) {
  for (const bool streaming_wins : {false, true}) {
    Tuner tuner(2, kSlotBytes, true);
    const auto cost = [&](const Scheme& s) { return Streams(s) == streaming_wins ? 1e-4 : 3e-4; };
    const auto wanted = streaming_wins ? Streams : Caches;
    Drive(tuner, 200, kBytes, cost, wanted);
    EXPECT_LE(Drive(tuner, 1000, kBytes, cost, wanted).seconds, 1.02 * 1000 * 1e-4);
  }
}

TEST(TunerTest, TriesAgainWhenTheMachineChanges) {
  Tuner tuner(2, kSlotBytes, true);
  Drive(tuner, 2000, kBytes, [](const Scheme& s) { return Streams(s) ? 3e-3 : 1e-3; }, Caches);
  const auto far = [](const Scheme& s) { return Streams(s) ? 1e-3 : 4e-3; };
  Drive(tuner, 300, kBytes, far, Streams);
  EXPECT_LE(Drive(tuner, 500, kBytes, far, Streams).seconds, 1.05 * 500 * 1e-3);
}

// The tuner notices that a scheme became faster even if the time of the scheme in use is unchanged.
TEST(TunerTest, FindsASchemeThatBecameFaster) {
  Tuner tuner(2, kSlotBytes, true);
  Drive(tuner, 2000, kBytes, [](const Scheme& s) { return Streams(s) ? 2e-3 : 1e-3; }, Caches);
  const auto cost = [](const Scheme& s) { return Streams(s) ? 0.8e-3 : 1e-3; };
  Drive(tuner, 5000, kBytes, cost, Streams);
  EXPECT_LE(Drive(tuner, 1000, kBytes, cost, Streams).seconds, 1.05 * 1000 * 0.8e-3);
}

// However unsteady the machine, and however slow the other schemes.
TEST(TunerTest, LosesLittleTimeInTrials) {
  for (const bool restless : {false, true}) {
    for (const double ratio : {1.1, 2.0, 8.0, 100.0}) {
      Tuner tuner(2, kSlotBytes, true);
      const uint64_t best = CandidateSchemes(DDL_ALL_REDUCE, kBytes, 2, kSlotBytes, true)[1].Encode();
      double lost = 0;
      double total = 0;
      int others = 0;
      for (int call = 0; call < 10'200; ++call) {
        const Scheme scheme = tuner.Choose(DDL_ALL_REDUCE, kBytes);
        const double fastest = restless && call / 400 % 2 == 1 ? 2e-4 : 1e-4;
        const bool other = scheme.Encode() != best;
        if (call >= 200) {  // by then it has chosen
          total += fastest;
          lost += other ? (ratio - 1) * fastest : 0;
          others += other ? 1 : 0;
        }
        tuner.Report(DDL_ALL_REDUCE, scheme, kBytes, other ? ratio * fastest : fastest);
      }
      EXPECT_LE(lost, 0.035 * total) << "times " << ratio;
      EXPECT_TRUE(ratio > 5 || others > 0) << "never again: times " << ratio;
    }
  }
}

TEST(TunerTest, IsAsFastAsTheBestSchemeWasOnARealMachine) {
  constexpr size_t kCalls = 20'000;
  for (const Recording& recording : kRecordings) {
    const auto candidates = CandidateSchemes(recording.kind, recording.bytes, recording.ranks, kSlotBytes, true);
    ASSERT_EQ(candidates.size(), recording.schemes.size()) << "record anew";
    for (const size_t calls_per_round : {30, 100, 400, 800}) {
      const auto seconds = [&](const Scheme& scheme, size_t call) {
        return recording.Seconds(scheme.Encode(), call, calls_per_round);
      };
      double best = std::numeric_limits<double>::infinity();
      for (const Scheme& scheme : candidates) {
        double total = 0;
        for (size_t call = 0; call < kCalls; ++call) total += seconds(scheme, call);
        best = std::min(best, total);
      }
      Tuner tuner(recording.ranks, kSlotBytes, true);
      double tuned = 0;
      for (size_t call = 0; call < kCalls; ++call) {
        const Scheme scheme = tuner.Choose(recording.kind, recording.bytes);
        tuner.Report(recording.kind, scheme, recording.bytes, seconds(scheme, call));
        tuned += seconds(scheme, call);
      }
      EXPECT_LE(tuned, 1.05 * best) << "kind " << recording.kind << ", " << recording.ranks << " ranks, "
                                    << recording.bytes << " bytes, " << calls_per_round;
    }
  }
}

TEST(TunerTest, IsNotMisledByASlowTrial) {
  Tuner tuner(2, kSlotBytes, true);
  double lost = 0;
  double total = 0;
  for (int call = 0; call < 1200; ++call) {
    const Scheme scheme = tuner.Choose(DDL_ALL_REDUCE, kBytes);
    const double fastest = call % 7 == 0 ? 5e-3 : 1e-4;  // every seventh call is slow, whatever its scheme
    const double more = Streams(scheme) ? 0 : 1e-4;
    if (call >= 200) {
      total += fastest;
      lost += more;
    }
    tuner.Report(DDL_ALL_REDUCE, scheme, kBytes, fastest + more);
  }
  EXPECT_LE(lost, 0.02 * total);
}

TEST(TunerTest, LearnsEachSmallSizeSeparatelyAndLargeOnesTogether) {
  Tuner tuner(2, kSlotBytes, true);
  const auto small = [](const Scheme& s) { return Streams(s) ? 2e-4 : 1e-4; };
  const auto large = [](const Scheme& s) { return Streams(s) ? 1e-2 : 2e-2; };
  Drive(tuner, 200, kBytes, small, Caches);
  Drive(tuner, 100, 64 * kBytes, large, Streams);
  EXPECT_GE(Drive(tuner, 100, kBytes, small, Caches).wanted, 90);
  EXPECT_GE(Drive(tuner, 100, 64 * kBytes, large, Streams).wanted, 90);
  EXPECT_GE(Drive(tuner, 100, 16 * kBytes, large, Streams).wanted, 90);
}

TEST(TunerTest, LearnsEachKindSeparately) {
  Tuner tuner(2, kSlotBytes, true);
  const auto reaches = [](const Scheme& scheme) { return scheme.algorithm == Algorithm::kCma; };
  int reached[2] = {0, 0};
  for (int call = 0; call < 2000; ++call) {
    for (const ddl_kind kind : {DDL_REDUCE_SCATTER, DDL_ALL_GATHER}) {
      const Scheme scheme = tuner.Choose(kind, kBytes);
      const bool fast = reaches(scheme) == (kind == DDL_REDUCE_SCATTER);
      tuner.Report(kind, scheme, kBytes, fast ? 1e-4 : 2e-4);
      reached[kind == DDL_ALL_GATHER ? 1 : 0] += call >= 1000 && reaches(scheme) ? 1 : 0;
    }
  }
  EXPECT_GE(reached[0], 970);
  EXPECT_LE(reached[1], 30);
}

// Proposals may be ahead of the all-reduces that use them.
TEST(TunerTest, IgnoresTimesOfEarlierSchemes) {
  Tuner tuner(2, kSlotBytes, true);
  const auto cost = [](const Scheme& s) { return Streams(s) ? 1e-4 : 3e-4; };
  std::deque<Scheme> proposed;
  int wanted = 0;
  for (int call = 0; call < 2000; ++call) {
    proposed.push_back(tuner.Choose(DDL_ALL_REDUCE, kBytes));
    if (proposed.size() < 4) continue;
    const Scheme scheme = proposed.front();
    proposed.pop_front();
    tuner.Report(DDL_ALL_REDUCE, scheme, kBytes, cost(scheme));
    wanted += call >= 1000 && Streams(scheme) ? 1 : 0;
  }
  EXPECT_GE(wanted, 950);
}

}  // namespace
}  // namespace ddl_test
