#include "engine/inline_path.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/guard.h"
#include "base/text.h"
#include "base/trace.h"
#include "base/waiter.h"
#include "common/hash.h"
#include "control/coordinator.h"
#include "engine/staging.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

// After this long, a rank that has outstanding requests is assumed not to come to the rendezvous.
constexpr double kAbsentPatienceSeconds = 10e-6;
// How often a running collective checks for an interrupt, and how long it then has to finish. A collective that makes
// progress ends within this time, so Ctrl-C does not break it.
constexpr double kInterruptCheckSeconds = 0.1;
constexpr double kInterruptGraceSeconds = 1.0;

// An all-reduce is eager up to this many bytes of one rank, or of all ranks together. Two ranks usually have a core
// each. Then the schemes that divide the work take half the time if the cores are far apart (64 KB on an AMD EPYC: 14
// us, eager 25 us) and a tenth more if they are near (11 us, eager 10 us). If more ranks share cores, waiting in these
// schemes costs more than eager data.
constexpr uint64_t kAlwaysEagerBytes = 16 * 1024;
constexpr uint64_t kEagerBytesOfTwo = 24 * 1024;
constexpr uint64_t kEagerBytesOfAll = 256 * 1024;

RendezvousRecord RecordOf(const ddl_request& request) {
  RendezvousRecord record{};
  TermWords words = WordsOf(TermsOf(request));
  // At a rendezvous `check` is never set, so its tolerance word is always 0, and the name's hash takes its place. Even
  // if the hashes of two names collide, the records differ if the collectives differ in anything else.
  words.back() ^= Hash(request.name);
  static_assert(sizeof words == sizeof record.must_agree);
  std::copy(words.begin(), words.end(), record.must_agree);
  record.rows = request.rows;
  return record;
}

size_t SplitBytes(const ddl_request& request, int size) {
  return request.kind == DDL_ALL_TO_ALL ? static_cast<size_t>(size) * sizeof *request.splits : 0;
}

}  // namespace

// With eager data every rank reads every rank's data, so from some size on the schemes that divide the work are faster.
bool IsEager(const ddl_request& request, int size) {
  const uint64_t bytes = BytesOf(request);
  if (request.kind == DDL_ALL_REDUCE) {
    if (request.op == DDL_ADASUM) return false;
    if (request.op == DDL_MEAN && !IsFloating(static_cast<ddl_dtype>(request.dtype))) return false;
    if (size == 2 && bytes > kEagerBytesOfTwo) return false;
    if (bytes > kAlwaysEagerBytes && bytes * static_cast<uint64_t>(size) > kEagerBytesOfAll) return false;
  } else if (request.kind != DDL_BROADCAST) {
    return false;
  }
  return bytes <= kEagerBytes;
}

InlinePath::InlinePath(Endpoint& endpoint)
    : endpoint_(endpoint),
      submissions_(endpoint.submissions()),
      rendezvous_(endpoint.memory()),
      sources_(static_cast<size_t>(endpoint.size())) {
  endpoint.OnCallingThread([this] { return Health(); }, [this] { return "'" + std::string(running_->name) + "'"; });
}

bool InlinePath::CanRun(const ddl_request& request) const {
  // A rank that joins waits until the others have no more data; its communication thread takes part meanwhile. Data on
  // a device would make the calling thread wait for the device.
  if (request.kind == DDL_JOIN || IsOnDevice(request)) return false;
  // An invalid request fails when it is submitted.
  if (endpoint_.memory().local_size() != endpoint_.size() || !Validate(request, endpoint_.size()).ok()) return false;
  if ((request.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK | kOfFailure)) != 0) return false;
  if (HasFreeRows(request.kind) && request.allocate == nullptr) return false;
  if (SplitBytes(request, endpoint_.size()) > kEagerBytes) return false;
  return request.kind != DDL_ALL_TO_ALL ||
         SplitsAreValid(request.splits, static_cast<size_t>(endpoint_.size()), request.rows);
}

int InlinePath::TryRun(const ddl_request& request, uint32_t patience_us) {
  if (!CanRun(request) || !submissions_.Enter()) return 0;
  const double submitted = Trace::Stamp();
  const bool eager = IsEager(request, endpoint_.size());
  if (!Completes([&] { Publish(request, eager); }) || !Meet(patience_us)) {
    submissions_.Leave({});
    return 0;
  }
  const bool agreed = rendezvous_.Agreed();
  const double started = Trace::Stamp();
  running_ = &request;
  interrupt_checked_at_ = 0;
  interrupted_since_ = 0;
  // From here on the other ranks count on this one, so an error cannot be undone and fails the communicator.
  Status status = agreed ? GuardedStatus([&] { return Run(request, eager); }) : Status();
  rendezvous_.Close();
  if (agreed && started > 0) {
    const uint64_t bytes = request.kind == DDL_BARRIER ? 0 : BytesOf(request);
    Trace::Add({KindName(static_cast<ddl_kind>(request.kind)), request.name, bytes, status.code(), submitted, started,
                started, Now()});
  }
  const bool interrupted = interrupted_since_ > 0;  // read while no other thread can enter
  const bool ran = agreed && status.ok();
  submissions_.Leave(std::move(status));
  if (!ran) return 0;
  num_run_.fetch_add(1, std::memory_order_relaxed);
  return interrupted ? 2 : 1;
}

void InlinePath::Publish(const ddl_request& request, bool eager) {
  RendezvousRecord& record = rendezvous_.record();
  record = RecordOf(request);
  // An all_to_all puts its splits where other collectives put eager data.
  if (request.kind == DDL_ALL_TO_ALL) {
    std::memcpy(rendezvous_.eager(), request.splits, SplitBytes(request, endpoint_.size()));
  }
  // No other collective can be timed between the proposal and its use: see submissions.h.
  if (request.kind == DDL_ALL_REDUCE && request.op != DDL_ADASUM && !eager) {
    record.scheme = endpoint_.collectives().Propose(BytesOf(request)).Encode();
  }
  if (!eager || (request.kind != DDL_ALL_REDUCE && request.root != endpoint_.rank())) return;
  char* to = rendezvous_.eager();
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    const size_t bytes = request.buffers[i].count * DtypeSize(static_cast<ddl_dtype>(request.dtype));
    Copy(to, request.buffers[i].in, bytes, Store::kRepMovsb);
    to += bytes;
  }
}

bool InlinePath::Meet(uint32_t patience_us) {
  if (rendezvous_.Arrive()) return true;
  const int spins = endpoint_.spins();
  for (int i = 0; i < spins; ++i) {
    if (rendezvous_.Complete()) return true;
    CpuRelax();
  }
  GroupMemory& memory = endpoint_.memory();
  const double start = Now();
  for (;;) {
    if (rendezvous_.Complete()) return true;
    const double waited = Now() - start;
    bool elsewhere = false;
    for (int local = 0; local < memory.local_size(); ++local) {
      const EngineBlock& block = BlockOf(memory, local);
      elsewhere = elsewhere || block.outstanding.load(std::memory_order_relaxed) != 0 ||
                  block.small_planned.load(std::memory_order_relaxed) != 0;
    }
    if (waited > patience_us * 1e-6 || (elsewhere && waited > kAbsentPatienceSeconds) || submissions_.stopped()) {
      return !rendezvous_.Withdraw();
    }
    sched_yield();
  }
}

std::vector<uint64_t> InlinePath::RowsAtRendezvous(const ddl_request& request) const {
  std::vector<uint64_t> rows;
  for (int local = 0; local < endpoint_.size(); ++local) {
    const auto* const splits = reinterpret_cast<const int64_t*>(rendezvous_.eager_of(local));
    rows.push_back(request.kind == DDL_ALL_TO_ALL ? static_cast<uint64_t>(splits[endpoint_.rank()])
                                                  : rendezvous_.record_of(local).rows);
  }
  return rows;
}

Status InlinePath::Run(const ddl_request& request, bool eager) {
  if (eager) return RunEager(request);
  Request own;
  own.Describe(request, endpoint_.size());
  Decision decision;
  if (HasFreeRows(request.kind)) decision.rows = RowsAtRendezvous(request);
  // An integer mean is reduced in wider integers, so its size differs from that of the proposal.
  if (request.kind == DDL_ALL_REDUCE && request.op != DDL_ADASUM &&
      (request.op != DDL_MEAN || IsFloating(static_cast<ddl_dtype>(request.dtype)))) {
    decision.scheme = Scheme::Decode(rendezvous_.record_of(0).scheme);
  }
  return endpoint_.executor().Run(own, decision);
}

Status InlinePath::RunEager(const ddl_request& request) {
  const auto dtype = static_cast<ddl_dtype>(request.dtype);
  const size_t element = DtypeSize(dtype);
  const int size = endpoint_.size();
  size_t offset = 0;
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    const ddl_buffer& buffer = request.buffers[i];
    const size_t bytes = buffer.count * element;
    if (request.kind == DDL_BROADCAST) {
      const void* from = request.root == endpoint_.rank() ? buffer.in : rendezvous_.eager_of(request.root) + offset;
      if (from != buffer.out) Copy(buffer.out, from, bytes, Store::kCached);
    } else {
      for (int local = 0; local < size; ++local) {
        sources_[static_cast<size_t>(local)] =
            local == endpoint_.rank() ? buffer.in : rendezvous_.eager_of(local) + offset;
      }
      Reduce(dtype, static_cast<ddl_op>(request.op), sources_.data(), size, buffer.out, buffer.count,
             static_cast<double>(size), Store::kCached);
    }
    offset += bytes;
  }
  return {};
}

Status InlinePath::Health() {
  // First of all, because a communication thread that ends waits for this thread; what it publishes is for other ranks.
  DDL_RETURN_IF_ERROR(endpoint_.CheckStopped());
  const RankBlock& own = endpoint_.memory().own();
  if (own.state.load(std::memory_order_acquire) == kBroken) return DecodeReason(own.reason);
  return CheckInterrupted();
}

Status InlinePath::CheckInterrupted() {
  if (running_->interrupted == nullptr) return {};
  const double now = Now();
  if (interrupted_since_ > 0) {
    if (now - interrupted_since_ < kInterruptGraceSeconds) return {};
    return {DDL_ABORTED,
            endpoint_.locations().Describe(endpoint_.rank()) + " was interrupted (Ctrl-C or another signal) during '" +
                running_->name + "', which made no progress",
            {{endpoint_.rank(), DDL_RANK_NAMED}}};
  }
  if (interrupt_checked_at_ == 0) interrupt_checked_at_ = now;
  if (now - interrupt_checked_at_ < kInterruptCheckSeconds) return {};
  if (running_->interrupted(running_->user) != 0) interrupted_since_ = now;
  interrupt_checked_at_ = Now();  // the call may take long
  return {};
}

}  // namespace ddl
