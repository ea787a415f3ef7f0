#include "meeting.h"

#include <cstring>

namespace ddl {

bool Meeting::Arrive() {
  const auto size = static_cast<uint64_t>(memory_.local_size());
  // Acquires the cards of those who came before, releases this one's to those who come after.
  const uint64_t before = word().fetch_add(1, std::memory_order_acq_rel);
  if ((before & 0xffff) + 1 != size) return false;
  word().store((number_ + 1) << 16, std::memory_order_release);
  return true;
}

bool Meeting::Withdraw() {
  const auto size = static_cast<uint64_t>(memory_.local_size());
  uint64_t seen = word().load(std::memory_order_acquire);
  do {
    // All there: the last to arrive is about to open the next meeting, or has.
    if (seen >> 16 != number_ || (seen & 0xffff) == size) return false;
  } while (!word().compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

bool Meeting::Agreed() const {
  const MeetingCard& first = card_of(0);
  for (int local = 1; local < memory_.local_size(); ++local) {
    if (std::memcmp(&card_of(local).must_agree, &first.must_agree, sizeof first.must_agree) != 0) return false;
  }
  return true;
}

}  // namespace ddl
