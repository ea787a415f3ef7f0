// OuterAllReduce: the all-reduce of one block across the outer dimensions of the box (hosts, racks, ...), or one of its
// halves. It is a state machine that never blocks, so that many blocks are in flight while the same thread works in
// shared memory.
//
// A block consists of one part for each of the G groups of the box. Each outer dimension, the fastest first, runs a
// ring reduce-scatter of the parts that this rank still has, until one part is left. Then all-gathers run in the
// opposite order (multi-dimensional ring, arXiv 1708.02188; a single ring: Patarasuk & Yuan, 2009). For a block of B
// bytes in equal parts and dimensions P1, P2, ... this rank sends
//   2 (P1-1)/P1 B + 2 (P2-1)/P2 B/P1 + ... = 2 (G-1)/G B,  G = P1 P2 ...,
// in 2 (P1-1 + P2-1 + ...) messages. Only 2 (Pk-1)/Pk B/(P1...Pk-1) of these bytes cross dimension k. Each half of the
// all-reduce sends half of the bytes. A part is always summed in the order of its rings, and every rank ends with the
// same copy.
//
// With compression, B counts 16-bit elements. A part is rounded whenever it is sent, and added in float32 where it
// arrives. The rank that owns a part rounds the sum and keeps the rounded sum; the other ranks pass on the bytes that
// they received. So all ranks end with the same copy here, too. In float16, a part is multiplied by a power of two that
// brings its largest number just below 2^15, so that nothing overflows and small numbers keep their digits. This factor
// is sent in front of the part.
//
// Each step is one message to the next rank of a ring and one from the previous. Messages between two ranks under one
// tag arrive in the order of the steps, so a tag belongs to one OuterAllReduce at a time.
#ifndef KERAS_DDL_CORE_NET_OUTER_ALL_REDUCE_H_
#define KERAS_DDL_CORE_NET_OUTER_ALL_REDUCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ddl.h"
#include "net/ring.h"
#include "net/wire.h"

namespace ddl {

// This rank's position in the ring along one dimension; next and previous are ranks of the communicator.
struct RingPosition {
  int size;
  int position;
  int next;
  int previous;
};

enum class Halves { kBoth, kReduceScatter, kAllGather };

class OuterAllReduce {
 public:
  // `dimensions`: fastest first.
  OuterAllReduce(const ddl_transport& transport, const std::vector<RingPosition>& dimensions, int tag);

  // Returns the number of the part that belongs to the group at `positions`, one position in each dimension. The parts
  // of the first dimension's first position come first.
  static size_t PartOf(const std::vector<int>& positions, const std::vector<int>& sizes);
  // The number of this rank's part.
  size_t own_part() const { return own_.begin; }

  // Returns memory for a block. parts: the elements of each part, equal on all ranks of the rings. With compression,
  // elements are float32. REQUIRES: done().
  char* Block(const std::vector<uint64_t>& parts, size_t element_bytes,
              ddl_compression compression = DDL_COMPRESSION_NONE);
  char* block() const { return data_; }
  char* part(size_t number) const { return data_ + at_[number] * bytes_; }
  // Starts on the contents of Block, which the result replaces. A reduce-scatter gives only this rank's part, and an
  // all-gather reads only this rank's part. COLLECTIVE over the ranks of the rings.
  //   across: not a mean; not read by an all-gather.
  //   last: null, or applied once to the sum of every element; only read if both halves run.
  //   errors: null, or with compression one number for each element of the block. They are added to the block, and
  //   replaced by the errors of this rank's rounding (with the divisor undone).
  Status Start(Halves halves, const Reduction& across, const Reduction* last = nullptr, float* errors = nullptr);
  // Advances as far as possible without blocking; sets *moved if it did anything.
  Status Progress(bool* moved);
  bool done() const { return received_ == steps_.size() && sends_.size() == 0; }
  // Cancels the messages in flight after a failure.
  void Cancel();
  // Describes the message that this waits for.
  std::string Describe() const { return (receives_.size() > 0 ? receives_ : sends_).Describe(); }

 private:
  struct Step {
    const RingPosition* ring;
    Range send;  // parts
    Range receive;
    bool reduces;  // else the message replaces the data
  };
  void AddSteps(const RingPosition& ring, const Range& parts, bool reduces);
  bool MayReceive(size_t step) const;
  void Take(const Step& step, size_t number);
  char* RecvScratch(size_t step) const { return recv_scratch_ + (step % 2) * recv_scratch_bytes_; }

  bool compressed() const { return compression_ != DDL_COMPRESSION_NONE; }
  uint64_t Elements(const Range& parts) const { return at_[parts.end] - at_[parts.begin]; }
  // The offset of a part in the memory that is sent: the rounded elements with compression, else the block.
  uint64_t WireOffset(uint64_t part) const;
  // The bytes of a message; 0 if it has no elements.
  uint64_t WireBytes(const Range& parts) const;
  char* Wire(const Range& parts) const { return (compressed() ? rounded_ : data_) + WireOffset(parts.begin); }
  // Writes the rounded elements of the parts to Wire. unit: see `errors` of Start.
  void Round(const Range& parts, float unit);
  // Writes the elements of a message to the block.
  void Unpack(const char* message, const Range& parts, bool adds);

  const std::vector<RingPosition> dimensions_;
  const int tag_;
  uint64_t num_parts_ = 1;
  Range own_{0, 1};  // this rank's part
  std::vector<Step> reduce_steps_of_box_;
  std::vector<Step> gather_steps_of_box_;
  WireMemory memory_;
  WireMessages sends_;
  WireMessages receives_;
  std::vector<uint64_t> at_;  // the element at which each part begins, and the end
  size_t bytes_ = 4;          // per element
  ddl_compression compression_ = DDL_COMPRESSION_NONE;
  Reduction across_{};
  Reduction last_{};
  bool has_last_ = false;
  float* errors_ = nullptr;
  char* data_ = nullptr;
  char* rounded_ = nullptr;
  char* recv_scratch_ = nullptr;
  uint64_t recv_scratch_bytes_ = 0;
  std::vector<Step> steps_;
  size_t reduce_steps_ = 0;
  size_t posted_ = 0;    // receives started
  size_t received_ = 0;  // steps whose message has arrived and was processed
  size_t sent_ = 0;      // steps whose message was sent
  size_t gathers_ = 0;   // sent messages of the all-gathers
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_OUTER_ALL_REDUCE_H_
