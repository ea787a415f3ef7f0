#include "liveness/heartbeat.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/tags.h"
#include "base/waiter.h"

namespace ddl {
namespace {

constexpr double kLookSeconds = 0.1;
constexpr double kBeatSeconds = 1.0;
// So many beats in a row must fail to come.
constexpr double kLostBeats = 4.0;
// Between two looks of a thread that ran all the time there is at most one long step of a reduction.
constexpr double kHeldUpSeconds = 1.0;
constexpr double kLifeSeconds = 2.0;
constexpr double kSilentSeconds = 3.0;
// What a heartbeat says: whether its sender is about to be held up.
constexpr char kBusy[] = "\1";
constexpr char kFree[] = "\2";

}  // namespace

bool ShowsLife(const RankBlock& block, double now) {
  return now - 1e-3 * static_cast<double>(block.alive_ms.load(std::memory_order_relaxed)) < kLifeSeconds;
}

Heartbeat::Heartbeat(const ddl_transport& transport, const GroupMemory& memory, const Places& places,
                     const std::vector<int>& group, double lost_after_s, std::function<bool(int rank)> has_left)
    : transport_(transport),
      memory_(memory),
      places_(places),
      lost_after_s_(lost_after_s),
      beat_s_(std::min(kBeatSeconds, lost_after_s / kLostBeats)),
      has_left_(std::move(has_left)),
      receives_(transport) {
  if (lost_after_s <= 0) return;
  const auto own = static_cast<size_t>(transport.rank);
  if (transport.rank != 0) {
    if (group[own] != group[0] && !places.at(0).same_pid_namespace)
      peers_.emplace_back(transport, std::vector<int>{0}, 0);
    return;
  }
  std::map<int, std::vector<int>> groups;
  for (int rank = 0; rank < transport.size; ++rank) {
    const int leader = group[static_cast<size_t>(rank)];
    if (leader != group[0] && !places.at(leader).same_pid_namespace) groups[leader].push_back(rank);
  }
  for (auto& [leader, ranks] : groups) peers_.emplace_back(transport, std::move(ranks), leader);
}

bool Heartbeat::Speaks(double now) const {
  for (int local = 0; local < memory_.local_rank(); ++local) {
    const RankBlock& block = memory_.block(local);
    if (block.state.load(std::memory_order_acquire) == kAlive && ShowsLife(block, now)) return false;
  }
  return true;
}

Status Heartbeat::Beat(double now) {
  if (peers_.empty() || now - looked_ < kLookSeconds) return {};
  const double pause = now - std::exchange(looked_, now);
  DDL_RETURN_IF_ERROR(Receive(now));
  const bool speaks = transport_.rank == 0 || Speaks(now);
  for (Peer& peer : peers_) {
    // Nobody sends to a rank that does not speak. Who was held up could not listen: counted from the next look on.
    if (!speaks) peer.heard = now;
    if (pause > kHeldUpSeconds) peer.heard = std::min(now, peer.heard == 0 ? now : peer.heard + pause);
  }
  if (speaks) DDL_RETURN_IF_ERROR(Send(now));
  for (Peer& peer : peers_) {
    if (peer.busy || now - peer.heard < lost_after_s_) continue;
    if (std::all_of(peer.ranks.begin(), peer.ranks.end(), has_left_)) {
      peer.heard = now;
      continue;
    }
    return {DDL_ABORTED, "no sign of life from " + places_.Of(peer.ranks) + " for " +
                             std::to_string(static_cast<int>(now - peer.heard)) + " s, seen from host " +
                             places_.at(transport_.rank).host +
                             ": that host is down or stands still, or the link to it is broken. Raise "
                             "KERAS_DDL_LOST_AFTER_SECONDS if it is only slow."};
  }
  return {};
}

void Heartbeat::SetBusy(bool busy) {
  if (peers_.empty() || busy == busy_) return;
  busy_ = busy;
  for (Peer& peer : peers_) peer.sent = 0;  // the news is due at once
  looked_ = 0;
  (void)Beat(Now());  // what is wrong, the next look finds
}

Status Heartbeat::Receive(double now) {
  std::vector<OwnedMessages::Finished> beats;
  DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(kBeatTag));
  DDL_RETURN_IF_ERROR(receives_.TakeFinished(&beats));
  for (const auto& [from, bytes] : beats) {
    for (Peer& peer : peers_) {
      if (std::find(peer.ranks.begin(), peer.ranks.end(), from) == peer.ranks.end()) continue;
      peer.heard = now;
      peer.speaker = from;
      peer.busy = bytes == kBusy;
    }
  }
  return {};
}

Status Heartbeat::Send(double now) {
  std::vector<OwnedMessages::Finished> none;
  for (Peer& peer : peers_) {
    DDL_RETURN_IF_ERROR(peer.beat.TakeFinished(&none));
    if (!peer.beat.empty() || now - peer.sent < beat_s_ || has_left_(peer.speaker)) continue;
    peer.sent = now;
    DDL_RETURN_IF_ERROR(peer.beat.Send(peer.speaker, kBeatTag, busy_ ? kBusy : kFree));
  }
  return {};
}

void Heartbeat::Cancel() {
  const double give_up = Now() + OwnedMessages::kCancelSeconds;
  receives_.Cancel(give_up);
  for (Peer& peer : peers_) peer.beat.Cancel(give_up);
}

std::string Heartbeat::Silent(double now) const {
  std::string text;
  for (const Peer& peer : peers_) {
    if (peer.busy || peer.heard == 0 || now - peer.heard < kSilentSeconds) continue;
    text += " No sign of life from " + places_.Of(peer.ranks) + " for " +
            std::to_string(static_cast<int>(now - peer.heard)) + " s.";
  }
  return text;
}

}  // namespace ddl
