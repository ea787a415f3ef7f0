// What a rank does between the moment it joins and the moment all ranks have.
#include <cstring>
#include <utility>

#include "base/trace.h"
#include "engine/engine.h"

namespace ddl {

void Engine::TakePartJoined(const Decision& decision) {
  if (!broken_.ok()) return;  // an abort has overtaken the decision
  BeginRun(*decision.submitted);
  bool broken = false;
  const Status status = executor_.RunJoined(decision, &broken);
  // Whoever submitted it hears of what concerns the request alone.
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
