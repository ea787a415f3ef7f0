// Makes the ranks of a group use the same scheme (scheme.h) for a collective that has several.
#ifndef KERAS_DDL_CORE_SHM_TUNED_H_
#define KERAS_DDL_CORE_SHM_TUNED_H_

#include <functional>
#include <optional>

#include "shm/pipeline.h"

namespace ddl {

// The scheme that this rank proposes for a `kind` of `bytes`. Local rank 0's counts: only it has the timings.
Scheme ProposeScheme(ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes);
// One through slots, which works for any buffers.
Scheme SlotScheme(const ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes);

// Calls `run` with the scheme that local rank 0 proposes, and tells its tuner how long that took. `agreed`: this
// scheme, if all ranks already have it; otherwise they fetch it. COLLECTIVE; `bytes` are equal on all ranks.
Status RunTuned(ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes, const std::optional<Scheme>& agreed,
                const std::function<Status(const Scheme&)>& run);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_TUNED_H_
