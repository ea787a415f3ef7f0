// Requests are matched by name, whatever their order and submitting thread, on every topology.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "test_data.h"
#include "thread_group.h"
#include "topologies.h"

namespace ddl_test {
namespace {

class OrderingTest : public testing::TestWithParam<size_t> {
 protected:
  const std::vector<int>& group() const { return Topologies()[GetParam()].group; }
  int size() const { return static_cast<int>(group().size()); }
};

// One all-reduce of float32 with its own values.
struct Job {
  Job(std::string name, int number, int rank) : data(17 + number * 13 % 300), call(DDL_ALL_REDUCE, std::move(name)) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(number * 10 + rank);
    call.Buffer(data.data(), data.data(), data.size());
  }
  std::vector<float> data;
  Call call;
  ddl_work* work = nullptr;
};

std::vector<float> Expected(int number, int size) {
  return std::vector<float>(17 + number * 13 % 300, static_cast<float>(size * number * 10 + size * (size - 1) / 2));
}

void Shuffle(std::vector<int>* order, uint64_t seed) {
  Random random(seed);
  for (size_t i = order->size(); i > 1; --i) std::swap((*order)[i - 1], (*order)[random.Below(i)]);
}

void SubmitShuffledAndCheck(const std::vector<int>& group, const std::function<std::string(int)>& name) {
  constexpr int kJobs = kSanitized ? 80 : 200;
  constexpr int kThreads = 3;
  const int size = static_cast<int>(group.size());
  RunRanks(group, [&](ddl_comm* comm, int rank) {
    std::vector<std::unique_ptr<Job>> jobs;
    std::vector<int> order;
    for (int i = 0; i < kJobs; ++i) {
      jobs.push_back(std::make_unique<Job>(name(i), i, rank));
      order.push_back(i);
    }
    Shuffle(&order, static_cast<uint64_t>(rank) + 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = t; i < kJobs; i += kThreads) jobs[order[i]]->work = jobs[order[i]]->call.Start(comm);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int i = 0; i < kJobs; ++i) {
      const Outcome outcome = Call::Finish(jobs[i]->work);
      ASSERT_EQ(outcome.code, DDL_OK) << outcome.message;
      ASSERT_EQ(jobs[i]->data, Expected(i, size)) << "request " << i;
    }
  });
}

TEST_P(OrderingTest, AnyOrderFromSeveralThreads) {
  SubmitShuffledAndCheck(group(), [](int i) { return "gradient/" + std::to_string(i); });
}

// The names are longer than a mailbox of the control channel.
TEST_P(OrderingTest, LongNamesInAnyOrder) {
  SubmitShuffledAndCheck(group(), [](int i) {
    std::string name = std::to_string(i);
    name.resize(1023, 'x');
    return name;
  });
}

TEST_P(OrderingTest, RequestsWithOneNameMatchInOrder) {
  RunRanks(group(), [&](ddl_comm* comm, int rank) {
    std::vector<std::unique_ptr<Job>> jobs;
    for (int i = 0; i < 100; ++i) {
      jobs.push_back(std::make_unique<Job>(i % 3 == 0 ? "a" : "b", i, rank));
      jobs.back()->work = jobs.back()->call.Start(comm);
    }
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(Call::Finish(jobs[i]->work).code, DDL_OK);
      ASSERT_EQ(jobs[i]->data, Expected(i, size())) << "request " << i;
    }
  });
}

// `done` runs on the communication thread and may submit, which starts a chain that no other thread drives.
struct Chain {
  ddl_comm* comm;
  int left;
  float value = 1;
  ddl_buffer buffer{};
  std::atomic<int> code{-1};

  void Next() {
    buffer = {&value, &value, 1, {}};
    ddl_request request{};
    request.kind = DDL_ALL_REDUCE;
    request.dtype = DDL_FLOAT32;
    request.op = DDL_MEAN;
    request.num_buffers = 1;
    request.buffers = &buffer;
    request.name = "chain";
    request.user = this;
    request.done = [](void* user, const ddl_failure* failure) {
      Chain& chain = *static_cast<Chain*>(user);
      if (failure != nullptr || --chain.left == 0) {
        chain.code = OutcomeOf(failure).code;
      } else {
        chain.value += 1;
        chain.Next();
      }
    };
    ddl_submit(comm, &request);
  }
};

TEST_P(OrderingTest, DoneMaySubmitTheNext) {
  RunRanks(group(), [&](ddl_comm* comm, int) {
    Chain chain{comm, 50};
    chain.Next();
    while (chain.code == -1) std::this_thread::yield();
    EXPECT_EQ(chain.code, DDL_OK);
    EXPECT_EQ(chain.value, 50.0f);
  });
}

TEST_P(OrderingTest, KindsMayBeMixed) {
  RunRanks(group(), [&](ddl_comm* comm, int rank) {
    constexpr int kRounds = 30;
    struct Round {
      std::vector<double> sum = std::vector<double>(1000), sent = std::vector<double>(500),
                          row = std::vector<double>(8);
      std::vector<std::unique_ptr<Call>> calls;
      std::vector<ddl_work*> works;
    };
    std::vector<Round> rounds(kRounds);
    for (int i = 0; i < kRounds; ++i) {
      Round& round = rounds[i];
      std::fill(round.sum.begin(), round.sum.end(), rank + i);
      if (rank == i % size()) std::fill(round.sent.begin(), round.sent.end(), 3.0 * i);
      std::fill(round.row.begin(), round.row.end(), rank);
      const std::string suffix = std::to_string(i);
      round.calls.push_back(std::make_unique<Call>(DDL_ALL_REDUCE, "sum" + suffix));
      round.calls.back()->Dtype(DDL_FLOAT64).Buffer(round.sum.data(), round.sum.data(), 1000);
      round.calls.push_back(std::make_unique<Call>(DDL_BROADCAST, "send" + suffix));
      round.calls.back()->Dtype(DDL_FLOAT64).Root(i % size()).Buffer(round.sent.data(), round.sent.data(), 500);
      round.calls.push_back(std::make_unique<Call>(DDL_ALL_GATHER, "rows" + suffix));
      round.calls.back()->Dtype(DDL_FLOAT64).Rows(2, 4).Buffer(round.row.data(), nullptr, 8);
      round.calls.push_back(std::make_unique<Call>(DDL_BARRIER, "meet" + suffix));
      if (rank % 2 == 1) std::reverse(round.calls.begin(), round.calls.end());
      for (auto& call : round.calls) round.works.push_back(call->Start(comm));
    }
    for (int i = 0; i < kRounds; ++i) {
      Round& round = rounds[i];
      if (rank % 2 == 1) std::reverse(round.works.begin(), round.works.end());
      ASSERT_EQ(ddl_work_wait(round.works[2], 60'000), 1);
      const auto* const gathered = static_cast<const double*>(ddl_work_data(round.works[2]));
      for (int k = 0; k < 8 * size(); ++k) ASSERT_EQ(gathered[k], k / 8);
      for (ddl_work* work : round.works) ASSERT_EQ(Call::Finish(work).code, DDL_OK);
      ASSERT_EQ(round.sum[999], size() * i + size() * (size() - 1) / 2.0);
      ASSERT_EQ(round.sent[499], 3.0 * i);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Topologies, OrderingTest, testing::Range(size_t{0}, Topologies().size()),
                         [](const auto& info) { return std::string("of_") + Topologies()[info.param].name; });

}  // namespace
}  // namespace ddl_test
