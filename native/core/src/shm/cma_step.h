// CmaStep: the common part of the collectives that read and write the ranks' own buffers (cross memory attach,
// peer_memory.h). It is one step of the pipeline, in which each rank publishes the addresses of its buffers in its
// slot. However many bytes move, ranks synchronize twice: at the beginning and at the end.
#ifndef KERAS_DDL_CORE_SHM_CMA_STEP_H_
#define KERAS_DDL_CORE_SHM_CMA_STEP_H_

#include <functional>
#include <vector>

#include "shm/pipeline.h"

namespace ddl {

class CmaStep {
 public:
  // Publishes `in`, which the other ranks read, and `out` of equal count, which they write (`in` again, if they do not
  // write). Calls `work` when all ranks have published, and returns when no rank touches this rank's memory any more.
  // *fit: whether `work` was called. It is called on all ranks or on none: none if the system calls cannot access some
  // rank's buffers, or a rank has too many pieces. A failure is reported with its root cause, and afterwards no rank
  // writes into this rank's memory. COLLECTIVE over the group.
  static Status Run(ShmPipeline& pipeline, const View& in, const View& out, bool* fit,
                    const std::function<Status(CmaStep&)>& work);

  // For `work`, which must call Check several times a second. Read copies elements [at, at + count) of local rank j's
  // `in` to `to`, from element to_at on. Write copies elements of this rank's `out` to the same elements of j's `out`.
  Status Read(int j, uint64_t at, const View& to, uint64_t to_at, uint64_t count);
  Status Write(int j, uint64_t at, uint64_t count);
  // Reduces elements [own_at, own_at + count) of `own` and the same elements of all other ranks' `in` into `result`,
  // from element own_at on. `own` is the part of this rank's `in` that begins at element own_begin.
  Status Reduce(const View& own, uint64_t own_begin, const View& result, uint64_t own_at, uint64_t count,
                const Reduction& reduction);
  Status Check() { return pipeline_.CheckHealthIfDue(); }

 private:
  struct Piece;
  struct PieceTable;

  explicit CmaStep(ShmPipeline& pipeline, size_t element_bytes)
      : pipeline_(pipeline),
        bytes_(element_bytes),
        step_(pipeline.Reserve(1)),
        sources_(static_cast<size_t>(pipeline.size())) {}

  Status Begin(const View& in, const View& out, bool* fit);
  void Publish(const View& in, const View& out);
  PieceTable* TableOf(int j) const { return reinterpret_cast<PieceTable*>(pipeline_.slot(j, step_)); }
  void Find(int j, uint64_t at, uint64_t count, char* Piece::* side, std::vector<iovec>* list) const;

  ShmPipeline& pipeline_;
  const size_t bytes_;
  const uint64_t step_;
  std::vector<const void*> sources_;
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_CMA_STEP_H_
