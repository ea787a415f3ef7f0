#include "shm/tuned.h"

namespace ddl {

Scheme SlotScheme(const ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes) {
  return CandidateSchemes(kind, bytes, pipeline.size(), pipeline.slot_bytes(), false)[0];
}

Scheme ProposeScheme(ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes) {
  // Without a choice, no rank needs to ask local rank 0.
  return bytes > UntunedBytes(kind) ? pipeline.tuner().Choose(kind, bytes) : SlotScheme(pipeline, kind, bytes);
}

Status RunTuned(ShmPipeline& pipeline, ddl_kind kind, uint64_t bytes, const std::optional<Scheme>& agreed,
                const std::function<Status(const Scheme&)>& run) {
  const bool tuned = bytes > UntunedBytes(kind);
  Scheme scheme = agreed.has_value() ? *agreed : ProposeScheme(pipeline, kind, bytes);
  if (tuned && !agreed.has_value()) {
    uint64_t code = scheme.Encode();
    DDL_RETURN_IF_ERROR(pipeline.Agree(code, &code));
    scheme = Scheme::Decode(code);
  }
  const double start = Now();
  DDL_RETURN_IF_ERROR(run(scheme));
  if (pipeline.rank() == 0 && tuned) pipeline.tuner().Report(kind, scheme, bytes, Now() - start);
  return {};
}

}  // namespace ddl
