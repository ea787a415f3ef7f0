// Steps of planned collectives, for tests of plans.
#ifndef KERAS_DDL_TESTS_ENGINE_PLAN_STEPS_H_
#define KERAS_DDL_TESTS_ENGINE_PLAN_STEPS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test_data.h"
#include "thread_group.h"

namespace ddl_test {

constexpr uint32_t kBuckets = 5;

// One bucket of one step, with its own values.
struct PlannedSum {
  PlannedSum(uint64_t plan, uint64_t step, uint32_t index, int rank, size_t count = 1000)
      : first(static_cast<float>(plan * 7000 + step * 10 + index)),
        data(count, first * static_cast<float>(rank + 1)),
        call(DDL_ALL_REDUCE, "plan" + std::to_string(plan) + "/" + std::to_string(index)) {
    call.Buffer(data.data(), data.data(), data.size());
    call.request.plan = plan;
    call.request.plan_run = call.request.step = plan << 32 | step;
    call.request.plan_index = index;
    call.request.plan_size = kBuckets;
  }
  void Check(int size) {
    const Outcome outcome = Call::Finish(work);
    EXPECT_EQ(outcome.code, DDL_OK) << outcome.message;
    EXPECT_EQ(data, std::vector<float>(data.size(), first * static_cast<float>(size * (size + 1) / 2)));
  }
  float first;
  std::vector<float> data;
  Call call;
  ddl_work* work = nullptr;
};

// Runs one step, whose buckets this rank submits in its own order.
inline void RunStep(ddl_comm* comm, uint64_t plan, uint64_t step, int rank) {
  std::vector<std::unique_ptr<PlannedSum>> buckets;
  for (uint32_t i = 0; i < kBuckets; ++i) buckets.push_back(std::make_unique<PlannedSum>(plan, step, i, rank));
  std::vector<uint32_t> order = {0, 1, 2, 3, 4};
  Random random(step * 100 + static_cast<uint64_t>(rank) + 1);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  for (const uint32_t i : order) buckets[i]->work = buckets[i]->call.Start(comm);
  for (auto& bucket : buckets) bucket->Check(ddl_size(comm));
}

inline ddl_counters Count(const ddl_comm* comm) {
  ddl_counters counters{};
  ddl_count(comm, &counters);
  return counters;
}

// Runs steps until one is planned again, which all ranks see alike.
inline void RunUntilPlanned(ddl_comm* comm, uint64_t step, int rank) {
  const uint64_t before = Count(comm).planned;
  for (int i = 0; i < 300 && Count(comm).planned == before; ++i) RunStep(comm, 1, step++, rank);
  EXPECT_GT(Count(comm).planned, before);
}

inline void Sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Ranks wait 0.1 s for a rank that has nothing to run.
inline RunOptions WithLane() {
  RunOptions options;
  options.lane = true;
  options.warn_after_s = 0.4;
  options.warn = [](void*, const char*) {};
  return options;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_ENGINE_PLAN_STEPS_H_
