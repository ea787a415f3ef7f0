// The messages of the control plane and their encoding.
//
// Each rank announces every collective to the coordinator (rank 0) with an Announcement. When all have arrived, the
// coordinator answers every rank with one Decision. Ranks execute Decisions in the order in which they were made, which
// is the same on all ranks. This order, unlike the order of submission, makes matching by name free of deadlocks.
#ifndef KERAS_DDL_CORE_CONTROL_MESSAGE_H_
#define KERAS_DDL_CORE_CONTROL_MESSAGE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/terms.h"
#include "ddl.h"
#include "shm/scheme.h"

namespace ddl {

// The longest texts in messages; longer texts are truncated with an ellipsis.
constexpr size_t kMaxName = 1023;
constexpr size_t kMaxDetail = 1023;
constexpr size_t kMaxError = 6000;

// "I am ready for this collective", with all facts that ranks must agree on, and details for errors.
struct Announcement : Terms {
  uint64_t step = 0;            // differs between ranks
  std::vector<int64_t> splits;  // DDL_ALL_TO_ALL: rows for each rank; differ between ranks
  std::string name;             // empty for a join
  std::string detail;
};

// Tells every rank what to do next with its oldest request of `name`, or with its join if there is no name.
struct Decision {
  ddl_code code = DDL_OK;  // DDL_OK: run it; else: fail it with `message`
  std::string name;        // empty if there is an id instead
  std::string message;
  FailedRanks ranks;           // the ranks that `message` names
  std::vector<uint64_t> rows;  // DDL_ALL_GATHER: each rank's rows; DDL_ALL_TO_ALL: its rows for this rank
  int32_t last_joined = -1;    // DDL_JOIN: the rank that joined last
  // Ranks that take part without their own request, because they have joined, and the request of the others.
  std::vector<int32_t> joined;
  std::optional<Announcement> submitted;  // set if any rank has joined
  std::optional<Scheme> scheme;           // DDL_ALL_REDUCE at an inline rendezvous: see ShmAllReduce; not sent
  uint32_t id = 0;                        // see known_collectives.h; 0: none
  bool gives_id = false;                  // from now on `id` stands for this request's announcement, on all ranks
  double agreed = 0;                      // when it arrived here, if a trace is being written; not sent

  Status status() const { return {code, message, ranks}; }
  void SetFailure(const Status& status) {
    code = status.code();
    message = status.message();
    ranks = status.ranks();
  }
};

// A rank's reply when it is asked where it is.
struct Position {
  std::string where;     // such as "train.py:12 in step"; empty: not known
  double idle_s = 0;     // how long its process has certainly done nothing but wait
  uint64_t pending = 0;  // its requests that wait, or are under way

  // Converts to and from text. The text that ddl_reply_position takes is the same without `pending`.
  std::string Encode() const;
  static Position Decode(const std::string& text);
};

enum class MessageType : uint8_t {
  kAnnounce = 1,         // rank -> coordinator: Announcement
  kLeave = 2,            // rank -> coordinator, or the coordinator to all: the sender leaves; payload: text
  kDecide = 3,           // coordinator -> rank: Decision
  kAbort = 4,            // anyone -> anyone: the communicator is broken; payload: EncodeReason
  kPositionQuery = 5,    // coordinator -> rank: where are you?
  kPositionPending = 6,  // rank -> coordinator: alive; whether a reply follows is not certain
  kPosition = 7,         // rank -> coordinator: the reply; payload: text
  kAnnounceKnown = 8,    // rank -> coordinator: an Announcement by its id; 13 bytes
  kDecideKnown = 9,      // coordinator -> rank: a Decision to run a collective, by its id; 9 bytes and the rows
};

std::string EncodeAnnouncement(const Announcement& announcement);
std::string EncodeKnown(uint32_t id, uint64_t step);
std::string EncodeDecision(const Decision& decision);
std::string EncodeText(MessageType type, const std::string& text);

MessageType TypeOf(const std::string& bytes);
// REQUIRES: bytes made by the encoder of the same library (ranks check the ABI version when they meet).
Announcement DecodeAnnouncement(const std::string& bytes);
uint32_t DecodeKnown(const std::string& bytes, uint64_t* step);
Decision DecodeDecision(const std::string& bytes);
std::string DecodeText(const std::string& bytes);

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_MESSAGE_H_
