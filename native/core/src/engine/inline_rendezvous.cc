#include "engine/inline_rendezvous.h"

#include <cstring>

namespace ddl {

bool InlineRendezvous::Arrive() {
  const auto size = static_cast<uint64_t>(memory_.local_size());
  // Acquires the records of ranks that came before, and releases this rank's record to ranks that come after. The last
  // rank opens the next rendezvous in the same instruction. Otherwise a rank could leave this rendezvous and come to
  // the next one before it is open.
  uint64_t seen = word().load(std::memory_order_acquire);
  uint64_t next = 0;
  do {
    next = (seen & 0xffff) + 1 == size ? (number_ + 1) << 16 : seen + 1;
  } while (!word().compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire));
  return next >> 16 != number_;
}

bool InlineRendezvous::Withdraw() {
  uint64_t seen = word().load(std::memory_order_acquire);
  do {
    if (seen >> 16 != number_) return false;
  } while (!word().compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

bool InlineRendezvous::Agreed() const {
  const RendezvousRecord& first = record_of(0);
  for (int local = 1; local < memory_.local_size(); ++local) {
    if (std::memcmp(record_of(local).must_agree, first.must_agree, sizeof first.must_agree) != 0) return false;
  }
  return true;
}

}  // namespace ddl
