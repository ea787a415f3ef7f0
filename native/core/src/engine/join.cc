// What a rank does from the time it joins until all ranks have joined.
#include <cstring>
#include <utility>

#include "base/trace.h"
#include "engine/engine.h"

namespace ddl {

void Engine::RunAsJoined(const Decision& decision) {
  if (!broken_.ok()) return;  // an abort has overtaken the decision
  BeginRun(*decision.submitted);
  bool broken = false;
  const Status status = executor_.RunJoined(decision, &broken);
  // A failure of the request alone is reported to the ranks that submitted it.
  (void)EndRun(status, broken);
}

void Engine::EndJoin(const Decision& decision) {
  const auto at = pending_.find(kJoin);
  if (at == pending_.end()) return;  // failed by an abort that overtook the decision
  const auto joins = std::move(at->second);
  pending_.erase(at);
  num_pending_ -= joins.size();
  executor_.EndJoin();
  const Status status(decision.code, decision.message);
  const double now = Trace::Stamp();
  for (const auto& join : joins) {
    if (status.ok()) std::memcpy(join->buffers[0].out, &decision.last_joined, sizeof decision.last_joined);
    if (now > 0) join->TraceRun(decision.agreed, now, status.code());
    Finish(*join, status);
  }
}

}  // namespace ddl
