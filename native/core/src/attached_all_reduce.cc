// All-reduce inside a group in which ranks reach each other's memory (peer_memory.h): Rabenseifner's scheme, reduce-
// scatter then all-gather, with one-sided transfers between the buffers themselves.
//
// Each rank owns a share of the elements. It reads the others' share from their inputs, chunk by chunk, adds it to its
// own, and writes the sum into its own output and all others', while it is in its cache. Nobody else reads or writes
// these elements, so the ranks meet twice, at the beginning and at the end, however much there is to reduce; and in
// place is nothing special.
//
// L ranks, N bytes each. A rank reads (L-1)/L N from others and writes as much into them, and adds N/L: for two ranks
// three passes over N/2, where slots take four.
#include <time.h>

#include <algorithm>

#include "shm_collectives.h"

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
  uint64_t count;  // kTooMany: does not fit into the slot
  Piece pieces[1];
};
constexpr uint64_t kTooMany = ~uint64_t{0};

constexpr double kLongestFarewellSeconds = 0.5;

class AttachedTransfers {
 public:
  AttachedTransfers(ShmPipeline& pipeline, const View& in, const View& out)
      : pipeline_(pipeline), in_(in), out_(out), step_(pipeline.Reserve(1)) {}

  // Shows the own pieces; returns when everyone's are there. *fit: whether they are.
  Status Begin(bool* fit) {
    DDL_RETURN_IF_ERROR(pipeline_.WaitFree(step_));
    Publish();
    pipeline_.MarkReady(step_);
    DDL_RETURN_IF_ERROR(pipeline_.WaitReady(step_));
    *fit = true;
    for (int j = 0; j < pipeline_.size(); ++j) *fit = *fit && TableOf(j)->count != kTooMany;
    return {};
  }
  // Nothing more will be done to the others' memory; returns when nobody does to this rank's.
  Status End() {
    pipeline_.MarkDone(step_);
    return pipeline_.WaitDone(step_);
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

 private:
  PieceTable* TableOf(int j) const { return reinterpret_cast<PieceTable*>(pipeline_.slot(j, step_)); }

  void Publish() {
    PieceTable* const table = TableOf(pipeline_.rank());
    const uint64_t room = (pipeline_.slot_bytes() - sizeof(PieceTable)) / sizeof(Piece) + 1;
    uint64_t count = 0;
    View::ForEachPair(in_, out_, 0, in_.count(), [&](char* in, char* out, uint64_t from, uint64_t n) {
      if (count < room) table->pieces[count] = {in, out, from * in_.element_bytes(), n * in_.element_bytes()};
      ++count;
    });
    table->count = count <= room ? count : kTooMany;
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
  const uint64_t step_;
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
};

Status ReduceOwnShare(ShmPipeline& pipeline, AttachedTransfers& transfers, const View& in, const View& out,
                      const Reduction& reduction, uint64_t chunk_bytes) {
  const int me = pipeline.rank();
  const int size = pipeline.size();
  const size_t bytes = in.element_bytes();
  const uint64_t chunk = chunk_bytes / bytes;
  const Share share = ShareOf(me, size, in.count(), bytes);
  char* const landing = pipeline.Landing(static_cast<size_t>(size) * chunk_bytes);
  std::vector<const void*> sources(static_cast<size_t>(size));
  for (uint64_t at = share.begin; at < share.end; at += chunk) {
    DDL_RETURN_IF_ERROR(pipeline.HealthIfDue());
    const uint64_t n = std::min(chunk, share.end - at);
    // Each rank starts with its neighbour, so that they do not all turn to one.
    for (int i = 1; i < size; ++i) {
      const int j = (me + i) % size;
      char* const to = landing + static_cast<uint64_t>(j) * chunk_bytes;
      DDL_RETURN_IF_ERROR(transfers.ReadInput(j, at * bytes, n * bytes, to));
    }
    View::ForEachPair(in, out, at, n, [&](const char* own, char* result, uint64_t from, uint64_t m) {
      for (int j = 0; j < size; ++j) {
        const char* const read = landing + static_cast<uint64_t>(j) * chunk_bytes + from * bytes;
        sources[static_cast<size_t>(j)] = j == me ? own : read;
      }
      Reduce(reduction.dtype, reduction.op, sources.data(), size, result, m, reduction.divisor, Store::kCached);
    });
    for (int i = 1; i < size; ++i) {
      DDL_RETURN_IF_ERROR(transfers.WriteOutput((me + i) % size, at * bytes, n * bytes));
    }
  }
  return {};
}

// That a rank died, or what it said when it gave up, tells more than that its memory is gone; but that is known a
// little later: the system takes a process's memory first.
Status WhyLost(ShmPipeline& pipeline, const Status& status) {
  const double start = Now();
  Status health = pipeline.Health();
  while (status.code() == DDL_ABORTED && health.ok() && Now() - start < kLongestFarewellSeconds) {
    const timespec pause{0, 1'000'000};
    nanosleep(&pause, nullptr);
    health = pipeline.Health();
  }
  return health.ok() ? status : health;
}

}  // namespace

Status AttachedAllReduce(ShmPipeline& pipeline, const View& in, const View& out, const Reduction& reduction,
                         uint64_t chunk_bytes) {
  AttachedTransfers transfers(pipeline, in, out);
  bool fit = false;
  Status status = transfers.Begin(&fit);
  if (status.ok() && fit) status = ReduceOwnShare(pipeline, transfers, in, out, reduction, chunk_bytes);
  if (status.ok()) status = transfers.End();
  if (!status.ok()) {
    pipeline.peers().Withdraw();
    return WhyLost(pipeline, status);
  }
  if (fit) return {};
  // Some rank's buffers are in more pieces than it can show. Everybody saw it, so everybody turns to the slots.
  const std::vector<Scheme> schemes = CandidateSchemes(in.bytes(), pipeline.size(), pipeline.slot_bytes(), false);
  return SlotAllReduce(pipeline, in, out, reduction, schemes[0]);
}

}  // namespace ddl
