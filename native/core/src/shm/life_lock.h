// Detects that a rank that shares memory has died, for any reason, even if its process cannot be seen
// (in another process-id namespace). Each rank holds a lock in its block while it is alive (a robust mutex), and the
// kernel marks the lock of a thread that ends without releasing it. A rank that is stopped or slow still holds its
// lock.
#ifndef KERAS_DDL_CORE_SHM_LIFE_LOCK_H_
#define KERAS_DDL_CORE_SHM_LIFE_LOCK_H_

#include "shm/group_memory.h"

namespace ddl {

class LifeLock {
 public:
  // By the rank itself, before any other may look.
  static void Prepare(RankBlock& own);

  // Held by the thread that constructs this, which must also destroy it.
  explicit LifeLock(RankBlock& own);
  ~LifeLock();
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;

  // Whether the thread that held the lock of `block` has ended without releasing it. Cost: about twenty nanoseconds.
  static bool IsBroken(RankBlock& block);

 private:
  RankBlock& own_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_LIFE_LOCK_H_
