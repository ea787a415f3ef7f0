#include "shm/life_lock.h"

#include <cerrno>

namespace ddl {
namespace {

enum State : uint32_t { kFree = 0, kHeld = 1, kDead = 2 };

}  // namespace

void LifeLock::Prepare(RankBlock& own) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&own.life, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

LifeLock::LifeLock(RankBlock& own) : own_(own) {
  // No other thread tries the lock before this state is visible.
  if (pthread_mutex_lock(&own.life) == 0) own.life_state.store(kHeld, std::memory_order_release);
}

LifeLock::~LifeLock() {
  if (own_.life_state.exchange(kFree, std::memory_order_relaxed) == kHeld) pthread_mutex_unlock(&own_.life);
}

bool LifeLock::IsBroken(RankBlock& block) {
  const uint32_t state = block.life_state.load(std::memory_order_acquire);
  if (state != kHeld) return state == kDead;
  const int error = pthread_mutex_trylock(&block.life);
  if (error == EOWNERDEAD) {
    // The lock tells only the first thread that tries it.
    block.life_state.store(kDead, std::memory_order_release);
    pthread_mutex_consistent(&block.life);
  }
  if (error == 0 || error == EOWNERDEAD) pthread_mutex_unlock(&block.life);
  return error == EOWNERDEAD;
}

}  // namespace ddl
