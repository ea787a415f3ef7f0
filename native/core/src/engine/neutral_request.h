// NeutralRequest: replaces the request of a rank that has joined, with neutral data and memory for results that nobody
// reads.
#ifndef KERAS_DDL_CORE_ENGINE_NEUTRAL_REQUEST_H_
#define KERAS_DDL_CORE_ENGINE_NEUTRAL_REQUEST_H_

#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace ddl {

class NeutralRequest {
 public:
  // This rank's request for the collective that other ranks have `submitted`. Its buffers belong to this object and are
  // valid until the next call. `size`: ranks of the communicator.
  // Cost: writes the bytes of one submitted input, and keeps that memory until Forget.
  // Throws std::bad_alloc.
  Request RequestFor(const Announcement& submitted, int size);
  // Frees the memory.
  void Forget() { memory_ = {}; }

 private:
  char* Reserve(uint64_t bytes);

  std::vector<char> memory_;
  uint64_t row_bytes_ = 0;  // of the all_gather under way
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_ENGINE_NEUTRAL_REQUEST_H_
