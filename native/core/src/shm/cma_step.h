// CmaStep: what the collectives that read and write the ranks' own buffers (cross memory attach, peer_memory.h) have in
// common. One step of the pipeline, in which each rank shows the others in its slot where its buffers lie: however much
// there is to move, ranks synchronize twice, at the beginning and at the end.
#ifndef KERAS_DDL_CORE_SHM_CMA_STEP_H_
#define KERAS_DDL_CORE_SHM_CMA_STEP_H_

#include <functional>
#include <vector>

#include "shm/pipeline.h"

namespace ddl {

class CmaStep {
 public:
  // Shows the others `in`, which they read, and `out`, of equal count, which they write (`in` again, if they do not);
  // calls `work` when all ranks have, and returns when none touches this rank's memory any more. *fit: whether `work`
  // was called: on all ranks or on none, if some rank's buffers are not open to the system calls or lie in too many
  // pieces. A failure is reported with its root cause, and no rank writes into this one's memory afterwards.
  // COLLECTIVE over the group.
  static Status Run(ShmPipeline& pipeline, const View& in, const View& out, bool* fit,
                    const std::function<Status(CmaStep&)>& work);

  // For `work`, which has to call Check several times a second. Elements [at, at + count) of local rank j's `in` into
  // those of `to` from to_at on; Write: of this rank's `out` into the same ones of j's.
  Status Read(int j, uint64_t at, const View& to, uint64_t to_at, uint64_t count);
  Status Write(int j, uint64_t at, uint64_t count);
  // Elements [own_at, own_at + count) of `own`, a part of this rank's `in` that begins `own_begin` elements into it,
  // and the same of all other ranks' `in`, reduced into `result` from own_at on.
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
