// The failures that are kept by number.
#include <pthread.h>

#include <deque>
#include <mutex>
#include <random>
#include <utility>

#include "base/failure.h"
#include "base/guard.h"
#include "ddl.h"

namespace {

// Only the first few failures of a step are ever looked up.
constexpr size_t kMaxKept = 4096;

struct Kept {
  std::mutex mutex;
  std::deque<std::pair<uint64_t, const ddl::FailureCopy*>> failures;  // oldest first, with consecutive numbers
  uint64_t next = 0;
};

// Never destroyed: a communication thread may still use it while the process ends.
Kept& KeptFailures() {
  static Kept* const kept = new Kept;
  return *kept;
}

// Returns a random number, so that numbers of different processes differ. 48 bits are 12 hexadecimal digits.
uint64_t FirstNumber() {
  std::random_device random;
  return ((uint64_t{random()} << 32 | random()) & ((uint64_t{1} << 48) - 1)) | 1;
}

}  // namespace

extern "C" {

uint64_t ddl_keep_failure(const ddl_failure* failure) {
  return ddl::GuardMemory(
      [&]() -> uint64_t {
        Kept& kept = KeptFailures();
        const std::lock_guard<std::mutex> lock(kept.mutex);
        if (kept.next == 0) kept.next = FirstNumber();
        kept.failures.emplace_back(kept.next, nullptr);
        ddl::GuardMemory([&] { kept.failures.back().second = new ddl::FailureCopy(*failure); },
                         [&](const std::exception&) {
                           kept.failures.pop_back();
                           throw;
                         });
        if (kept.failures.size() > kMaxKept) {
          kept.failures.front().second->Release();
          kept.failures.pop_front();
        }
        return kept.next++;
      },
      [](const std::exception&) -> uint64_t { return 0; });
}

const ddl_failure* ddl_find_failure(uint64_t number) {
  return ddl::GuardMemory(
      [&]() -> const ddl_failure* {
        Kept& kept = KeptFailures();
        const std::lock_guard<std::mutex> lock(kept.mutex);
        if (kept.failures.empty() || number < kept.failures.front().first || number >= kept.next) return nullptr;
        const ddl::FailureCopy* const found = kept.failures[number - kept.failures.front().first].second;
        found->Hold();
        return found;
      },
      [](const std::exception&) -> const ddl_failure* { return nullptr; });
}

void ddl_release_failure(const ddl_failure* failure) { static_cast<const ddl::FailureCopy*>(failure)->Release(); }

}  // extern "C"
