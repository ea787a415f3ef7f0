// OuterAllReduce: the all-reduce of one block across the outer dimensions of the box (hosts, racks, ...), or one of its
// halves, as a state machine: it never blocks, so that many blocks are in flight while the same thread works in shared
// memory.
//
// A block consists of one part for each of the G groups of the box. Steps: along each outer dimension in turn, the
// fastest first, a ring reduce-scatter of what the previous one left to this rank, in the end one part; then
// all-gathers back in the opposite order (multi-dimensional ring, arXiv 1708.02188; a single ring: Patarasuk & Yuan,
// 2009). For a block of B bytes in equal parts and dimensions P1, P2, ... this rank sends
//   2 (P1-1)/P1 B + 2 (P2-1)/P2 B/P1 + ... = 2 (G-1)/G B,  G = P1 P2 ...,
// in 2 (P1-1 + P2-1 + ...) messages; of these bytes only 2 (Pk-1)/Pk B/(P1...Pk-1) cross dimension k. Each half sends
// one half of that. A part is summed in the order of its rings, hence always in the same order; every rank ends with
// the same copy.
//
// Compressed, B is that of 16-bit elements. A part is rounded whenever it is sent, and added in float32 where it
// arrives. The rank that owns a part rounds the sum, and itself takes what the others will; they pass on the bytes that
// they received. So all ranks end with the same copy here, too. A part of float16 travels behind the power of two that
// it was multiplied with, by which its largest number is just below 2^15: nothing overflows, and small numbers keep
// their places.
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

  // The number of the part that belongs to the group at `positions`, one in each dimension: those of the first
  // dimension's first position come first.
  static size_t PartOf(const std::vector<int>& positions, const std::vector<int>& sizes);
  // Of this rank.
  size_t own_part() const { return own_.begin; }

  // Memory for a block whose parts have so many elements, equally on all ranks of the rings. Compressed: of float32.
  // REQUIRES: done().
  char* Block(const std::vector<uint64_t>& parts, size_t element_bytes,
              ddl_compression compression = DDL_COMPRESSION_NONE);
  char* block() const { return data_; }
  char* part(size_t number) const { return data_ + at_[number] * bytes_; }
  // Starts on the contents of Block; the result replaces them. Of a reduce-scatter only this rank's part counts, of an
  // all-gather only that is read. COLLECTIVE over the ranks of the rings.
  //   across: not a mean; not read by an all-gather. last: null, or applied once to the sum of every element; read
  //   where there are both halves. errors: null, or one number for each element of the block, compressed only: they are
  //   added to the block, and replaced by what this rank's rounding takes away from the sum (its divisor undone).
  Status Start(Halves halves, const Reduction& across, const Reduction* last = nullptr, float* errors = nullptr);
  // Advances as far as possible without blocking; sets *moved if it did anything.
  Status Progress(bool* moved);
  bool done() const { return received_ == steps_.size() && sends_.size() == 0; }
  // Cancels the messages in flight after a failure.
  void Cancel();
  // What this waits for.
  std::string Describe() const { return (receives_.size() > 0 ? receives_ : sends_).Describe(); }

 private:
  struct Step {
    const RingPosition* ring;
    Range send;  // parts
    Range receive;
    bool reduces;  // else the message replaces what is there
  };
  void AddSteps(const RingPosition& ring, const Range& parts, bool reduces);
  bool MayReceive(size_t step) const;
  void Take(const Step& step, size_t number);
  char* RecvScratch(size_t step) const { return recv_scratch_ + (step % 2) * recv_scratch_bytes_; }

  bool compressed() const { return compression_ != DDL_COMPRESSION_NONE; }
  uint64_t Elements(const Range& parts) const { return at_[parts.end] - at_[parts.begin]; }
  // Where a part lies in what travels of the block: its elements, rounded, or the block itself.
  uint64_t WireOffset(uint64_t part) const;
  // Of a message; 0 where there are no elements.
  uint64_t WireBytes(const Range& parts) const;
  char* Wire(const Range& parts) const { return (compressed() ? rounded_ : data_) + WireOffset(parts.begin); }
  // The parts' elements, rounded, to Wire; `unit`: see Start, errors.
  void Round(const Range& parts, float unit);
  // The elements of a message to the block.
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
  size_t bytes_ = 4;          // of an element
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
  size_t gathers_ = 0;   // of these, messages of the all-gathers
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_OUTER_ALL_REDUCE_H_
