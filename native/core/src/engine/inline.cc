// How a calling thread runs a collective itself, at a rendezvous (inline_rendezvous.h) of all ranks' calling threads.
//
// Why no other collective can use the group's memory meanwhile: a rank goes to a rendezvous only when nothing of its
// own is outstanding, and announces nothing until it has left. A collective is decided when every rank has announced
// it: hence before any rank arrived (then it was outstanding) or after every rank has left.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/trace.h"
#include "common/hash.h"
#include "engine/engine.h"
#include "shm/doorbell.h"

namespace ddl {
namespace {

// After this long, a rank with requests at the coordinator is assumed not to come to the rendezvous.
constexpr double kAbsentPatienceSeconds = 10e-6;

// All-reduces whose data is eager: up to this many bytes of one rank, or of all together.
constexpr uint64_t kAlwaysEagerBytes = 16 * 1024;
constexpr uint64_t kEagerBytesOfAll = 256 * 1024;

RendezvousRecord RecordOf(const ddl_request& request) {
  RendezvousRecord record{};
  TermWords words = WordsOf(TermsOf(request));
  // A rendezvous is without checks, and their tolerance 0: its place is taken by the name. Two names that collide are
  // still told apart where anything else about the collectives differs.
  words.back() ^= Hash(request.name);
  static_assert(sizeof words == sizeof record.must_agree);
  std::copy(words.begin(), words.end(), record.must_agree);
  record.rows = request.rows;
  return record;
}

// Whether the data is sent with the record: the same answer on every rank, since it follows from what must agree. Every
// rank reads every rank's data, so among many ranks the schemes that divide the work are faster from some size on.
bool IsEager(const ddl_request& request, int size) {
  if (request.kind == DDL_ALL_REDUCE) {
    if (request.op == DDL_ADASUM) return false;
    if (request.op == DDL_MEAN && !IsFloating(static_cast<ddl_dtype>(request.dtype))) return false;
    if (BytesOf(request) > kAlwaysEagerBytes && BytesOf(request) * static_cast<uint64_t>(size) > kEagerBytesOfAll)
      return false;
  } else if (request.kind != DDL_BROADCAST) {
    return false;
  }
  return BytesOf(request) <= kEagerBytes;
}

}  // namespace

int Engine::TryRun(const ddl_request& request, uint32_t patience_us) {
  // A rank that joins waits until the others have no more data; the communication thread takes part meanwhile.
  if (request.kind == DDL_JOIN) return 0;
  // Submit reports what is wrong with a request.
  if (memory_->local_size() != transport_.size || !Validate(request, transport_.size).ok()) return 0;
  if ((request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK | kOfFailure)) != 0) return 0;
  if (HasFreeRows(request.kind) && request.allocate == nullptr) return 0;
  const size_t num_splits = request.kind == DDL_ALL_TO_ALL ? static_cast<size_t>(transport_.size) : 0;
  if (num_splits * sizeof *request.splits > kEagerBytes) return 0;
  if (num_splits > 0 && !SplitsAreValid(request.splits, num_splits, request.rows)) return 0;
  Engine* const lane = request.plan_size > 0 ? planned_engine_.load(std::memory_order_acquire) : nullptr;
  if (lane != nullptr && lane->HasSmall()) return 0;
  if (!EnterInline()) return 0;
  const double submitted = Trace::Stamp();
  const bool eager = IsEager(request, transport_.size);
  RendezvousRecord& record = rendezvous_.record();
  record = RecordOf(request);
  // An all_to_all has its splits where others have small data.
  if (num_splits > 0) std::memcpy(rendezvous_.eager(), request.splits, num_splits * sizeof *request.splits);
  // Nothing else can be timed between the proposal and its use: see above.
  if (request.kind == DDL_ALL_REDUCE && request.op != DDL_ADASUM && !eager) {
    record.scheme = collectives_.Propose(BytesOf(request)).Encode();
  }
  if (eager && (request.kind == DDL_ALL_REDUCE || request.root == transport_.rank)) {
    char* to = rendezvous_.eager();
    for (uint32_t i = 0; i < request.num_buffers; ++i) {
      const size_t bytes = request.buffers[i].count * DtypeSize(static_cast<ddl_dtype>(request.dtype));
      Copy(to, request.buffers[i].in, bytes, Store::kRepMovsb);
      to += bytes;
    }
  }
  if (!Rendezvous(patience_us)) {
    LeaveInline({});
    return 0;
  }
  const bool agreed = rendezvous_.Agreed();
  const double started = Trace::Stamp();
  running_inline_ = &request;
  interrupt_checked_at_ = 0;
  interrupted_since_ = 0;
  const Status status = agreed ? RunInline(request, eager) : Status();
  rendezvous_.Close();
  if (agreed && started > 0) {
    const uint64_t bytes = request.kind == DDL_BARRIER ? 0 : BytesOf(request);
    Trace::Add({KindName(static_cast<ddl_kind>(request.kind)), request.name, bytes, status.code(), submitted, started,
                started, Now()});
  }
  const bool interrupted = interrupted_since_ > 0;  // read while no other thread can enter
  LeaveInline(status);
  if (!agreed || !status.ok()) return 0;
  inline_.fetch_add(1, std::memory_order_relaxed);
  if (lane != nullptr) lane->Skip({request.plan, request.plan_run, request.plan_index, request.plan_size});
  return interrupted ? 2 : 1;
}

bool Engine::EnterInline() {
  if (Forked()) return false;  // before the lock: see Submit
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_ || inline_busy_ || !usable_) return false;
  // Synchronizes with what the communication thread did for requests that have ended.
  if (OwnBlock(*memory_).outstanding.load(std::memory_order_acquire) != 0) return false;
  if (BlockOf(*memory_, 0).no_rendezvous.load(std::memory_order_relaxed) != 0) return false;
  inline_busy_ = true;
  return true;
}

void Engine::LeaveInline(const Status& status) {
  // Rings under the lock: afterwards Close may free the memory.
  const std::lock_guard<std::mutex> lock(mutex_);
  inline_busy_ = false;
  if (!status.ok()) {
    usable_ = false;
    inline_failure_ = status;
  }
  if (!status.ok() || !submitted_.empty() || stop_) RingBell(memory_->own());
}

bool Engine::Rendezvous(uint32_t patience_us) {
  if (rendezvous_.Arrive()) return true;
  const int spins = waiter_.spins();
  for (int i = 0; i < spins; ++i) {
    if (rendezvous_.Complete()) return true;
    CpuRelax();
  }
  const double start = Now();
  for (;;) {
    if (rendezvous_.Complete()) return true;
    const double waited = Now() - start;
    bool elsewhere = false;
    for (int local = 0; local < memory_->local_size(); ++local) {
      elsewhere = elsewhere || BlockOf(*memory_, local).outstanding.load(std::memory_order_relaxed) != 0;
    }
    if (waited > patience_us * 1e-6 || (elsewhere && waited > kAbsentPatienceSeconds) || stop_) {
      return !rendezvous_.Withdraw();
    }
    sched_yield();
  }
}

std::vector<uint64_t> Engine::RowsAtRendezvous(const ddl_request& request) const {
  std::vector<uint64_t> rows;
  for (int local = 0; local < transport_.size; ++local) {
    const auto* const splits = reinterpret_cast<const int64_t*>(rendezvous_.eager_of(local));
    rows.push_back(request.kind == DDL_ALL_TO_ALL ? static_cast<uint64_t>(splits[transport_.rank])
                                                  : rendezvous_.record_of(local).rows);
  }
  return rows;
}

Status Engine::RunInline(const ddl_request& request, bool eager) {
  const auto dtype = static_cast<ddl_dtype>(request.dtype);
  if (!eager) {
    Request own;
    own.Describe(request, transport_.size);
    Decision decision;
    if (HasFreeRows(request.kind)) decision.rows = RowsAtRendezvous(request);
    // An integer mean is reduced in wider integers: not the bytes that the proposal was for.
    if (request.kind == DDL_ALL_REDUCE && request.op != DDL_ADASUM &&
        (request.op != DDL_MEAN || IsFloating(static_cast<ddl_dtype>(request.dtype)))) {
      decision.scheme = Scheme::Decode(rendezvous_.record_of(0).scheme);
    }
    // A request that all ranks can carry out fails only when the ranks fall out of step.
    bool broken = false;
    running_ = &own.announcement;
    const Status status = executor_.Run(own, decision, &broken);
    running_ = nullptr;
    return status;
  }
  const size_t element = DtypeSize(dtype);
  std::vector<const void*>& sources = sources_;
  size_t offset = 0;
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    const ddl_buffer& buffer = request.buffers[i];
    const size_t bytes = buffer.count * element;
    if (request.kind == DDL_BROADCAST) {
      const void* from = request.root == transport_.rank ? buffer.in : rendezvous_.eager_of(request.root) + offset;
      if (from != buffer.out) Copy(buffer.out, from, bytes, Store::kCached);
    } else {
      for (int local = 0; local < transport_.size; ++local) {
        sources[static_cast<size_t>(local)] =
            local == transport_.rank ? buffer.in : rendezvous_.eager_of(local) + offset;
      }
      Reduce(dtype, static_cast<ddl_op>(request.op), sources.data(), transport_.size, buffer.out, buffer.count,
             static_cast<double>(transport_.size), Store::kCached);
    }
    offset += bytes;
  }
  return {};
}

}  // namespace ddl
