// Cross-memory-attach (CMA) all-reduce, inside a group in which ranks can reach each other's memory (peer_memory.h):
// Rabenseifner's scheme, reduce-scatter then all-gather, with one-sided transfers directly between the buffers.
//
// Each rank owns a shard of the elements. It reads the others' data for it from their inputs, chunk by chunk, adds them
// to its own, and writes the sum into its own output and all others' while it is in its cache. A rank that has finished
// takes over chunks from those that have not. Only one rank reads or writes the elements of a chunk, so the ranks
// synchronize twice, at the beginning and at the end, however much there is to reduce; and reducing in place needs no
// special case.
//
// L ranks, N bytes each. A rank reads (L-1)/L N from others and writes as much into them, and adds N/L: for two ranks
// three passes over N/2, where slots take four.
#include <time.h>

#include <algorithm>
#include <new>

#include "shm/collectives.h"

namespace ddl {
namespace {

// A run of elements that lies in one piece both in a rank's input and in its output.
struct Piece {
  char* in;
  char* out;
  uint64_t begin;  // bytes before it
  uint64_t bytes;
};

// What a rank shows the others in its slot.
struct PieceTable {
  uint64_t count;  // kNotAccessible: too many for the slot, or not open to the system calls
  Piece pieces[1];
};
constexpr uint64_t kNotAccessible = ~uint64_t{0};

// Time to find the root cause: how long it may take until it is known that a process ended, or why a rank gave up.
// Buffers are already safe by then.
constexpr double kAttributionSeconds = 3;

class CmaSteps {
 public:
  CmaSteps(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction, uint64_t chunk_bytes)
      : pipeline_(pipeline),
        in_(in),
        out_(out),
        reduction_(reduction),
        bytes_(in.element_bytes()),
        chunk_(chunk_bytes / bytes_),
        step_(pipeline.Reserve(1)),
        recv_scratch_(pipeline.RecvScratch(static_cast<size_t>(pipeline.size()) * chunk_bytes)),
        sources_(static_cast<size_t>(pipeline.size())) {}

  // Publishes this rank's pieces; returns when all ranks have. *fit: whether all could be published.
  Status Begin(bool* fit) {
    DDL_RETURN_IF_ERROR(pipeline_.WaitFree(step_));
    Publish();
    pipeline_.ResetClaims();
    pipeline_.MarkReady(step_);
    DDL_RETURN_IF_ERROR(pipeline_.WaitReady(step_));
    *fit = true;
    for (int j = 0; j < pipeline_.size(); ++j) *fit = *fit && TableOf(j)->count != kNotAccessible;
    return {};
  }
  // This rank's own shard first, which is warm in its caches; then chunks that the others have not yet claimed, because
  // their cores are slower or busy. Which rank reduces a chunk does not change its sum.
  Status ReduceShards() {
    for (int i = 0; i < pipeline_.size(); ++i) {
      const int owner = (pipeline_.rank() + i) % pipeline_.size();
      const Range shard = ShardOf(owner, pipeline_.size(), in_.count(), bytes_);
      for (;;) {
        const uint64_t at = shard.begin + pipeline_.Claim(owner) * chunk_;
        if (at >= shard.end) break;
        DDL_RETURN_IF_ERROR(pipeline_.CheckHealthIfDue());
        DDL_RETURN_IF_ERROR(ReduceChunk(at, std::min(chunk_, shard.end - at)));
      }
    }
    return {};
  }
  // This rank no longer touches the others' memory; returns when none touches this rank's.
  Status End() {
    pipeline_.MarkDone(step_);
    return pipeline_.WaitDone(step_);
  }

 private:
  Status ReduceChunk(uint64_t at, uint64_t n) {
    const int me = pipeline_.rank();
    const int size = pipeline_.size();
    const auto scratch_of = [&](int j) { return recv_scratch_ + static_cast<uint64_t>(j) * n * bytes_; };
    // Each rank starts with its neighbour, so that they do not all read from one.
    for (int i = 1; i < size; ++i) {
      const int j = (me + i) % size;
      DDL_RETURN_IF_ERROR(ReadInput(j, at * bytes_, n * bytes_, scratch_of(j)));
    }
    View::ForEachPair(in_, out_, at, n, [&](const char* own, char* result, uint64_t from, uint64_t m) {
      for (int j = 0; j < size; ++j) {
        sources_[static_cast<size_t>(j)] = j == me ? own : scratch_of(j) + from * bytes_;
      }
      Reduce(reduction_.dtype, reduction_.op, sources_.data(), size, result, m, reduction_.divisor, Store::kCached);
    });
    for (int i = 1; i < size; ++i) DDL_RETURN_IF_ERROR(WriteOutput((me + i) % size, at * bytes_, n * bytes_));
    return {};
  }

  // Bytes [at, at + bytes) of local rank j's input, into `to`.
  Status ReadInput(int j, uint64_t at, uint64_t bytes, char* to) {
    local_.assign(1, {to, bytes});
    Find(j, at, bytes, &Piece::in, &remote_);
    return pipeline_.peers().Read(j, local_, remote_);
  }
  // The same bytes of this rank's output into local rank j's.
  Status WriteOutput(int j, uint64_t at, uint64_t bytes) {
    Find(pipeline_.rank(), at, bytes, &Piece::out, &local_);
    Find(j, at, bytes, &Piece::out, &remote_);
    return pipeline_.peers().Write(j, local_, remote_);
  }

  PieceTable* TableOf(int j) const { return reinterpret_cast<PieceTable*>(pipeline_.slot(j, step_)); }

  void Publish() {
    PieceTable* const table = TableOf(pipeline_.rank());
    const uint64_t room = (pipeline_.slot_bytes() - sizeof(PieceTable)) / sizeof(Piece) + 1;
    uint64_t count = 0;
    remote_.clear();
    View::ForEachPair(in_, out_, 0, in_.count(), [&](char* in, char* out, uint64_t from, uint64_t n) {
      if (count++ >= room) return;
      table->pieces[count - 1] = {in, out, from * bytes_, n * bytes_};
      remote_.push_back({in, 1});
      if (out != in) remote_.push_back({out, 1});
    });
    table->count = count <= room && PeerMemory::Accessible(remote_) ? count : kNotAccessible;
  }

  void Find(int j, uint64_t at, uint64_t bytes, char* Piece::* side, std::vector<iovec>* list) const {
    const PieceTable* const table = TableOf(j);
    const Piece* const end = table->pieces + table->count;
    const Piece* piece =
        std::upper_bound(table->pieces, end, at, [](uint64_t offset, const Piece& p) { return offset < p.begin; }) - 1;
    list->clear();
    for (; bytes > 0; ++piece) {
      const uint64_t skip = at - piece->begin;
      const uint64_t n = std::min(piece->bytes - skip, bytes);
      list->push_back({piece->*side + skip, n});
      at += n;
      bytes -= n;
    }
  }

  ShmPipeline& pipeline_;
  const View& in_;
  const View& out_;
  const Reduction reduction_;
  const size_t bytes_;
  const uint64_t chunk_;  // elements
  const uint64_t step_;
  char* const recv_scratch_;
  std::vector<const void*> sources_;
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
};

// That a rank died, or why it gave up, says more than that its memory is gone. But it is known a little later: the
// system frees a process's memory first.
Status RootCause(ShmPipeline& pipeline, const Status& status) {
  const double start = Now();
  Status health = pipeline.Health();
  while (health.ok() && status.code() != DDL_DEADLINE_EXCEEDED && Now() - start < kAttributionSeconds) {
    const timespec pause{0, 1'000'000};
    nanosleep(&pause, nullptr);
    health = pipeline.Health();
  }
  return health.ok() ? status : health;
}

}  // namespace

Status CmaAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                    uint64_t chunk_bytes) {
  CmaSteps steps(pipeline, in, out, reduction, chunk_bytes);
  bool fit = false;
  Status status;
  try {
    status = steps.Begin(&fit);
    if (status.ok() && fit) status = steps.ReduceShards();
    if (status.ok()) status = steps.End();
  } catch (const std::bad_alloc&) {
    pipeline.peers().RevokeAccess();
    throw;
  }
  if (!status.ok()) {
    pipeline.peers().RevokeAccess();
    return RootCause(pipeline, status);
  }
  if (fit) return {};
  // Some rank's buffers are inaccessible. All ranks have seen that, so all of them use the slots instead.
  const std::vector<Scheme> schemes = CandidateSchemes(in.bytes(), pipeline.size(), pipeline.slot_bytes(), false);
  return SlotAllReduce(pipeline, in, out, reduction, schemes[0]);
}

}  // namespace ddl
