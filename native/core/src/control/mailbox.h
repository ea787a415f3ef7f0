// Mailboxes: the control messages between a rank and a coordinator of the same group, in shared memory.
#ifndef KERAS_DDL_CORE_CONTROL_MAILBOX_H_
#define KERAS_DDL_CORE_CONTROL_MAILBOX_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shm/group_memory.h"

namespace ddl {

constexpr size_t kMailboxBytes = 64 * 1024;

// Single producer, single consumer ring of bytes. All zero: empty.
struct Mailbox {
  alignas(64) std::atomic<uint64_t> head;  // bytes ever written
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever read
  alignas(64) char data[kMailboxBytes];
};

// One entry of a mailbox: a message, or a piece of one that is too long for the mailbox.
struct MailboxPiece {
  std::string bytes;
  bool more;  // another piece of the same message follows
};

// False when it does not fit now. REQUIRES: bytes.size() + 4 <= kMailboxBytes.
bool MailboxPut(Mailbox& box, const MailboxPiece& piece);
// Appends what has arrived of the oldest message to `message`; true when it is complete.
bool MailboxTake(Mailbox& box, std::string* message);

// The mailboxes of one rank.
struct Mailboxes {
  Mailbox to_coordinator;
  Mailbox from_coordinator;
};
static_assert(sizeof(Mailboxes) <= kControlBytes, "raise kControlBytes");

inline Mailboxes& MailboxesOf(RankBlock& block) { return *reinterpret_cast<Mailboxes*>(block.control); }

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_MAILBOX_H_
