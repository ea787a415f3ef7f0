// InlinePath: if all ranks share memory, their calling threads run a collective themselves at a rendezvous
// (inline_rendezvous.h), without the communication threads or the coordinator.
#ifndef KERAS_DDL_CORE_ENGINE_INLINE_PATH_H_
#define KERAS_DDL_CORE_ENGINE_INLINE_PATH_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/endpoint.h"
#include "engine/inline_rendezvous.h"

namespace ddl {

// Whether each rank's data, at most kEagerBytes, is sent with its rendezvous record. Equal on all ranks, because it
// depends only on values that must agree.
bool IsEager(const ddl_request& request, int size);

class InlinePath {
 public:
  // `endpoint`: that of the coordinated queue. It must outlive this.
  explicit InlinePath(Endpoint& endpoint);

  // Any thread. Runs the request on this thread, waiting about `patience_us` for the other ranks to do the same.
  // Returns what ddl_try_run does; 0 also if the communicator broke, which submitting the request then reports.
  int TryRun(const ddl_request& request, uint32_t patience_us);
  // Any thread. Collectives that ran here.
  uint64_t num_run() const { return num_run_; }

 private:
  bool CanRun(const ddl_request& request) const;
  void Publish(const ddl_request& request, bool eager);
  bool Meet(uint32_t patience_us);
  Status Run(const ddl_request& request, bool eager);
  Status RunEager(const ddl_request& request);
  // See Decision::rows.
  std::vector<uint64_t> RowsAtRendezvous(const ddl_request& request) const;
  Status Health();
  // DDL_ABORTED when the caller was interrupted a while ago and the collective has not ended.
  Status CheckInterrupted();

  Endpoint& endpoint_;
  Submissions& submissions_;
  InlineRendezvous rendezvous_;
  std::vector<const void*> sources_;  // scratch of RunEager
  // Of the thread that is inside: its request, when it last checked for an interrupt, and when one came; 0: never.
  const ddl_request* running_ = nullptr;
  double interrupt_checked_at_ = 0;
  double interrupted_since_ = 0;
  std::atomic<uint64_t> num_run_{0};
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_INLINE_PATH_H_
