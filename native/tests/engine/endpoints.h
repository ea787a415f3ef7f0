// Ranks as threads, each with its own endpoint or engine parts, for tests of these parts.
#ifndef KERAS_DDL_TESTS_ENGINE_ENDPOINTS_H_
#define KERAS_DDL_TESTS_ENGINE_ENDPOINTS_H_

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/endpoint.h"
#include "thread_group.h"
#include "thread_transport.h"

namespace ddl_test {

// `group`: as for RunRanks. `body` runs on a thread for each rank, and must not close the endpoint.
inline void RunEndpoints(const std::vector<int>& group,
                         const std::function<void(std::unique_ptr<ddl::Endpoint>, int rank)>& body,
                         double deadline_s = 30) {
  const int size = static_cast<int>(group.size());
  std::vector<ddl_transport> transports = MakeThreadTransports(size);
  const std::vector<int32_t> leaders(group.begin(), group.end());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ddl_options options{};
      options.abi_version = DDL_ABI_VERSION;
      options.group = leaders.data();
      options.deadline_s = deadline_s;
      std::unique_ptr<ddl::Endpoint> endpoint;
      const ddl::Status status = ddl::Endpoint::Create(transports[static_cast<size_t>(rank)], options, &endpoint);
      EXPECT_TRUE(status.ok()) << status.message();
      if (status.ok()) body(std::move(endpoint), rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Lets ranks go on when all have come. Used once.
class Meeting {
 public:
  explicit Meeting(size_t ranks) : missing_(ranks) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) all_here_.notify_all();
    all_here_.wait(lock, [this] { return missing_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  size_t missing_;
};

// A sum of `count` ones, as a submitted request; Wait returns its outcome.
class OwnSum {
 public:
  OwnSum(const std::string& name, size_t count) : data_(count, 1), request_(std::make_unique<ddl::Request>()) {
    request_->announcement.kind = DDL_ALL_REDUCE;
    request_->announcement.count = count;
    request_->announcement.name = name;
    request_->buffers = {{data_.data(), data_.data(), count, {}}};
    request_->user = this;
    request_->done = [](void* user, const ddl_failure* failure) {
      auto& self = *static_cast<OwnSum*>(user);
      const std::lock_guard<std::mutex> lock(self.mutex_);
      self.outcome_ = OutcomeOf(failure);
      self.done_ = true;
      self.changed_.notify_all();
    };
  }
  ddl::Request& request() { return *request_; }
  std::unique_ptr<ddl::Request> Take() { return std::move(request_); }
  bool IsDone() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  Outcome Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [this] { return done_; })) {
      return {DDL_INTERNAL, "not done after 60 s"};
    }
    return outcome_;
  }
  const std::vector<float>& data() const { return data_; }

 private:
  std::vector<float> data_;
  std::unique_ptr<ddl::Request> request_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Outcome outcome_;
};

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_ENGINE_ENDPOINTS_H_
