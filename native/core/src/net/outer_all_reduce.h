// OuterAllReduce: the all-reduce of one block across the outer dimensions of the box (hosts, racks, ...), as a state
// machine: it never blocks, so that many blocks are in flight while the same thread works in shared memory.
//
// Steps: along each outer dimension in turn, the fastest first, a ring reduce-scatter of what the previous one left to
// this rank; then all-gathers back in the opposite order (multi-dimensional ring, arXiv 1708.02188; a single ring:
// Patarasuk & Yuan, 2009). For a block of B bytes and dimensions P1, P2, ... this rank sends
//   2 (P1-1)/P1 B + 2 (P2-1)/P2 B/P1 + ... = 2 (G-1)/G B,  G = P1 P2 ...,
// in 2 (P1-1 + P2-1 + ...) messages; of these bytes only 2 (Pk-1)/Pk B/(P1...Pk-1) cross dimension k.
// A chunk is summed in the order of its ring, hence always in the same order; every rank ends with the same copy.
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

class OuterAllReduce {
 public:
  // `dimensions`: fastest first.
  OuterAllReduce(const ddl_transport& transport, const std::vector<RingPosition>& dimensions, int tag)
      : dimensions_(dimensions),
        tag_(tag),
        sends_(transport, memory_, WireMessages::kSends),
        receives_(transport, memory_, WireMessages::kReceives) {}

  // Memory for a block of `count` elements. REQUIRES: done().
  char* Block(uint64_t count, ddl_dtype dtype);
  char* block() const { return data_; }
  // Starts reducing the contents of Block; the result replaces them. `across` is not a mean; `last` (or null) is
  // applied once to the sum of every element. COLLECTIVE over the ranks of the rings.
  Status Start(const Reduction& across, const Reduction* last);
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
    Range send;
    Range receive;
    bool reduces;  // else the message replaces what is there
  };
  void AddSteps(const RingPosition& ring, const std::vector<Range>& chunks, bool reduces);
  bool MayReceive(size_t step) const;
  void Take(const Step& step, size_t number);
  char* RecvScratch(size_t step) const { return recv_scratch_ + (step % 2) * recv_scratch_bytes_; }

  const std::vector<RingPosition> dimensions_;
  const int tag_;
  WireMemory memory_;
  WireMessages sends_;
  WireMessages receives_;
  uint64_t count_ = 0;
  ddl_dtype dtype_ = DDL_FLOAT32;
  size_t bytes_ = 4;
  Reduction across_{};
  Reduction last_{};
  bool has_last_ = false;
  char* data_ = nullptr;
  char* recv_scratch_ = nullptr;
  uint64_t recv_scratch_bytes_ = 0;
  std::vector<Step> steps_;
  size_t reduce_steps_ = 0;
  Range own_{0, 0};      // fully reduced by this rank once the reduce-scatters are done
  size_t posted_ = 0;    // receives started
  size_t received_ = 0;  // steps whose message has arrived and was processed
  size_t sent_ = 0;      // steps whose message was sent
  size_t gathers_ = 0;   // of these, messages of the all-gathers
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_NET_OUTER_ALL_REDUCE_H_
