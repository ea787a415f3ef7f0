#include "engine/queue.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "control/coordinator.h"

namespace ddl {
namespace {

// How often a leaving rank checks whether a calling thread has finished.
constexpr unsigned kInlinePollUs = 100;

}  // namespace

Queue::Queue(Endpoint& endpoint) : endpoint_(endpoint), submissions_(endpoint.submissions()) {
  endpoint.OnBroken([this](const Status& status) { Fail(status); });
}

bool Queue::TakeSubmissions() {
  std::vector<std::unique_ptr<Request>> requests;
  Status failure;
  if (!submissions_.Take(&requests, &failure)) return false;
  if (!failure.ok()) endpoint_.Break(endpoint_.WithSuspects(failure));
  for (auto& request : requests) Add(std::move(request));
  return !requests.empty();
}

bool Queue::TakeMessages() {
  return endpoint_.TakeMessages([this](int peer, const std::string& bytes) { Handle(peer, bytes); });
}

void Queue::Check() {
  if (endpoint_.broken().ok()) {
    if (CheckHealth()) CheckDeadlines();
    return;
  }
  // When rank 0 leaves, a calling thread may be in a collective with other ranks, so keep checking on it.
  const Status health = submissions_.IsInside() ? endpoint_.Health() : Status();
  if (!health.ok()) endpoint_.PublishBroken(health);
}

bool Queue::CheckHealth() {
  const Status health = endpoint_.Health();
  if (!health.ok()) endpoint_.Break(health);
  return health.ok();
}

void Queue::Finish(const Request& request, const Status& status) {
  request.ticket.reset();
  submissions_.CountEnded();
  CallDone(request.done, request.user, request.announcement.name.c_str(), status);
}

Status Queue::WithPendingRequest(const Status& status, const Announcement& announcement) {
  return status.Reworded(status.message() + " (pending: " + Label(announcement) + ")");
}

int64_t Queue::PollUs(double idle_s) { return std::clamp<int64_t>(static_cast<int64_t>(idle_s * 1e6 / 8), 20, 500); }

void Queue::Leave() {
  // The other ranks need a calling thread that is in a collective, so wait for it. It gives up after a while.
  while (submissions_.IsInside()) {
    (void)CheckHealth();
    usleep(kInlinePollUs);
  }
  std::vector<std::unique_ptr<Request>> late;
  Status failure;
  (void)submissions_.Take(&late, &failure);
  if (!failure.ok()) endpoint_.Break(failure);
  const Status closed(DDL_NOT_FOUND, "the communicator has been shut down");
  for (auto& request : late) {
    if (!request->is_marker()) Finish(*request, closed);
  }
  const std::string promised = DescribePromised();
  Fail(closed);
  // Other ranks may already be running a collective that this rank has announced, and would wait for this rank.
  if (!promised.empty()) {
    endpoint_.Break({DDL_UNAVAILABLE,
                     "rank " + std::to_string(endpoint_.rank()) + " has left while " + promised +
                         " was pending there (its process ended or called shutdown)",
                     {{endpoint_.rank(), DDL_RANK_LEFT}}});
  }
  // Another rank has died, which perhaps only this rank's lane has noticed. This rank leaves because of that, and must
  // not be reported as missing instead.
  const Status peers = endpoint_.CheckPeers();
  if (!peers.ok()) endpoint_.Break(peers);
  if (endpoint_.broken().ok()) {
    SendLast();
    if (endpoint_.rank() != 0) endpoint_.channel().Send(0, EncodeText(MessageType::kLeave, ""));
    const std::string text = EncodeText(
        MessageType::kLeave, "rank 0 has left (its process ended or called shutdown); no collective can follow");
    for (int rank = 1; endpoint_.rank() == 0 && rank < endpoint_.size(); ++rank) {
      if (!endpoint_.left(rank)) endpoint_.channel().Send(rank, text);
    }
    endpoint_.PublishLeft();
  }
  endpoint_.Drain();
  Cancel();
}

}  // namespace ddl
