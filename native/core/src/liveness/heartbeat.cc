#include "liveness/heartbeat.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/tags.h"
#include "base/waiter.h"

namespace ddl {
namespace {

constexpr double kPollSeconds = 0.1;
constexpr double kBeatSeconds = 1.0;
// The number of consecutive beats that a lost rank must have missed.
constexpr double kMissedBeats = 4.0;
// A thread that runs without a pause polls at least this often: between two polls it does at most one long step of a
// reduction.
constexpr double kStallSeconds = 1.0;
constexpr double kActivitySeconds = 2.0;
constexpr double kSilentSeconds = 3.0;
// The payload of a heartbeat: whether its sender is about to block for long.
constexpr char kBusy[] = "\1";
constexpr char kFree[] = "\2";

}  // namespace

bool ShowsRecentActivity(const RankBlock& block, double now) {
  return now - 1e-3 * static_cast<double>(block.alive_ms.load(std::memory_order_relaxed)) < kActivitySeconds;
}

Heartbeat::Heartbeat(const ddl_transport& transport, const GroupMemory& memory, const RankLocations& locations,
                     const std::vector<int>& group, double lost_after_s, std::function<bool(int rank)> has_left)
    : transport_(transport),
      memory_(memory),
      locations_(locations),
      lost_after_s_(lost_after_s),
      beat_s_(std::min(kBeatSeconds, lost_after_s / kMissedBeats)),
      has_left_(std::move(has_left)),
      receives_(transport) {
  if (lost_after_s <= 0) return;
  const auto own = static_cast<size_t>(transport.rank);
  if (transport.rank != 0) {
    if (group[own] != group[0] && !locations.at(0).same_pid_namespace)
      peers_.emplace_back(transport, std::vector<int>{0}, 0);
    return;
  }
  std::map<int, std::vector<int>> groups;
  for (int rank = 0; rank < transport.size; ++rank) {
    const int leader = group[static_cast<size_t>(rank)];
    if (leader != group[0] && !locations.at(leader).same_pid_namespace) groups[leader].push_back(rank);
  }
  for (auto& [leader, ranks] : groups) peers_.emplace_back(transport, std::move(ranks), leader);
}

bool Heartbeat::IsSender(double now) const {
  for (int local = 0; local < memory_.local_rank(); ++local) {
    const RankBlock& block = memory_.block(local);
    if (block.state.load(std::memory_order_acquire) == kAlive && ShowsRecentActivity(block, now)) return false;
  }
  return true;
}

Status Heartbeat::Beat(double now) {
  if (peers_.empty() || now - last_poll_ < kPollSeconds) return {};
  const double pause = now - std::exchange(last_poll_, now);
  DDL_RETURN_IF_ERROR(Receive(now));
  const bool is_sender = transport_.rank == 0 || IsSender(now);
  for (Peer& peer : peers_) {
    // Nobody sends to a rank that is not its group's sender. A rank that was stalled could not receive: count from now
    // on.
    if (!is_sender) peer.last_received = now;
    if (pause > kStallSeconds)
      peer.last_received = std::min(now, peer.last_received == 0 ? now : peer.last_received + pause);
  }
  if (is_sender) DDL_RETURN_IF_ERROR(Send(now));
  for (Peer& peer : peers_) {
    if (peer.busy || now - peer.last_received < lost_after_s_) continue;
    if (std::all_of(peer.ranks.begin(), peer.ranks.end(), has_left_)) {
      peer.last_received = now;
      continue;
    }
    return {DDL_ABORTED,
            "no sign of life from " + locations_.Describe(peer.ranks) + " for " +
                std::to_string(static_cast<int>(now - peer.last_received)) + " s, seen from host " +
                locations_.at(transport_.rank).host +
                ": that host is down or frozen, or the link to it is broken. Raise KERAS_DDL_LOST_AFTER_SECONDS if it "
                "is only slow.",
            InRole(DDL_RANK_SILENT, peer.ranks)};
  }
  return {};
}

void Heartbeat::SetBusy(bool busy) {
  if (peers_.empty() || busy == busy_) return;
  busy_ = busy;
  for (Peer& peer : peers_) peer.last_sent = 0;  // send the new state at once
  last_poll_ = 0;
  (void)Beat(Now());  // the next poll reports any error
}

Status Heartbeat::Receive(double now) {
  std::vector<OwnedMessages::Finished> beats;
  DDL_RETURN_IF_ERROR(receives_.ReceiveArriving(kBeatTag));
  DDL_RETURN_IF_ERROR(receives_.TakeFinished(&beats));
  for (const auto& [from, bytes] : beats) {
    for (Peer& peer : peers_) {
      if (std::find(peer.ranks.begin(), peer.ranks.end(), from) == peer.ranks.end()) continue;
      peer.last_received = now;
      peer.contact = from;
      peer.busy = bytes == kBusy;
    }
  }
  return {};
}

Status Heartbeat::Send(double now) {
  std::vector<OwnedMessages::Finished> none;
  for (Peer& peer : peers_) {
    DDL_RETURN_IF_ERROR(peer.beat.TakeFinished(&none));
    if (!peer.beat.empty() || now - peer.last_sent < beat_s_ || has_left_(peer.contact)) continue;
    peer.last_sent = now;
    DDL_RETURN_IF_ERROR(peer.beat.Send(peer.contact, kBeatTag, busy_ ? kBusy : kFree));
  }
  return {};
}

void Heartbeat::Cancel() {
  const double give_up = Now() + OwnedMessages::kCancelSeconds;
  receives_.Cancel(give_up);
  for (Peer& peer : peers_) peer.beat.Cancel(give_up);
}

std::string Heartbeat::DescribeSilence(double now, FailedRanks* ranks) const {
  std::string text;
  for (const Peer& peer : peers_) {
    if (peer.busy || peer.last_received == 0 || now - peer.last_received < kSilentSeconds) continue;
    text += " No sign of life from " + locations_.Describe(peer.ranks) + " for " +
            std::to_string(static_cast<int>(now - peer.last_received)) + " s.";
    if (ranks == nullptr) continue;
    const FailedRanks silent = InRole(DDL_RANK_SILENT, peer.ranks);
    ranks->insert(ranks->end(), silent.begin(), silent.end());
  }
  return text;
}

}  // namespace ddl
