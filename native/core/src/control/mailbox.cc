#include "control/mailbox.h"

#include <algorithm>
#include <cstring>

namespace ddl {
namespace {

// A flag in the length of a piece: another piece of the message follows.
constexpr uint32_t kMorePieces = 1u << 31;

void RingCopyIn(Mailbox& box, uint64_t at, const void* from, size_t bytes) {
  const size_t offset = at % kMailboxBytes;
  const size_t first = std::min(bytes, kMailboxBytes - offset);
  std::memcpy(box.data + offset, from, first);
  std::memcpy(box.data, static_cast<const char*>(from) + first, bytes - first);
}

void RingCopyOut(const Mailbox& box, uint64_t at, void* to, size_t bytes) {
  const size_t offset = at % kMailboxBytes;
  const size_t first = std::min(bytes, kMailboxBytes - offset);
  std::memcpy(to, box.data + offset, first);
  std::memcpy(static_cast<char*>(to) + first, box.data, bytes - first);
}

}  // namespace

bool MailboxPut(Mailbox& box, const MailboxPiece& piece) {
  const auto size = static_cast<uint32_t>(piece.bytes.size());
  const uint32_t header = piece.more ? size | kMorePieces : size;
  const uint64_t head = box.head.load(std::memory_order_relaxed);
  const uint64_t tail = box.tail.load(std::memory_order_acquire);
  if (kMailboxBytes - (head - tail) < size + sizeof header) return false;
  RingCopyIn(box, head, &header, sizeof header);
  RingCopyIn(box, head + sizeof header, piece.bytes.data(), size);
  box.head.store(head + sizeof header + size, std::memory_order_release);
  return true;
}

bool MailboxTake(Mailbox& box, std::string* message) {
  for (;;) {
    const uint64_t tail = box.tail.load(std::memory_order_relaxed);
    const uint64_t head = box.head.load(std::memory_order_acquire);
    if (head == tail) return false;
    uint32_t header = 0;
    RingCopyOut(box, tail, &header, sizeof header);
    const uint32_t size = header & ~kMorePieces;
    const size_t before = message->size();
    message->resize(before + size);
    RingCopyOut(box, tail + sizeof header, message->data() + before, size);
    box.tail.store(tail + sizeof header + size, std::memory_order_release);
    if ((header & kMorePieces) == 0) return true;
  }
}

}  // namespace ddl
