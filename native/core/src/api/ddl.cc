// The C ABI over Engine. It only translates calls. C cannot catch exceptions, so every function that may allocate uses
// the guards of base/guard.h.
#include "ddl.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "api/comm.h"
#include "base/failure.h"
#include "base/guard.h"
#include "base/trace.h"
#include "common/wait.h"
#include "kernels/kernels.h"

// Shared by the caller and the communication thread: freed by whichever releases it last.
struct ddl_work {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  ddl_failure failure = {DDL_OK, 0, nullptr, "out of memory", "", -1};  // points into `copy` unless memory was short
  const ddl::FailureCopy* copy = nullptr;
  std::vector<char> data;
  std::vector<uint64_t> rows;
  size_t element_bytes = 0;
  uint64_t row_count = 0;
  void* (*allocate)(void* user, const uint64_t* rows_by_rank, int size) = nullptr;  // the caller's
  void* allocate_user = nullptr;
  std::atomic<int> owners{2};

  void Release() {
    if (owners.fetch_sub(1) != 1) return;
    if (copy != nullptr) copy->Release();
    delete this;
  }
};

namespace {

// Guards lookup and hold together: in between, the creator could free the communicator.
std::mutex published_mutex;
std::map<int64_t, ddl_comm*> published;
// A forked child must find the lock free, even if other threads held it.
void UnlockPublishedInForkedChildren() {
  static const int kept = pthread_atfork([] { published_mutex.lock(); }, [] { published_mutex.unlock(); },
                                         [] { published_mutex.unlock(); });
  static_cast<void>(kept);
}

int SelfGather(void*, const void* in, void* out, size_t bytes) {
  std::memcpy(out, in, bytes);
  return DDL_OK;
}
int SelfProbe(void*, int, int* peer, size_t*) {
  *peer = -1;
  return DDL_OK;
}
int SelfAllReduce(void*, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t) {
  std::memcpy(out, in, count * ddl::DtypeSize(static_cast<ddl_dtype>(dtype)));
  return DDL_OK;
}
const char* SelfError(void*) { return ""; }
void SelfDestroy(void*) {}

// A communicator of one rank sends nothing.
ddl_transport SelfTransport() {
  ddl_transport transport{};
  transport.abi_version = DDL_ABI_VERSION;
  transport.size = 1;
  transport.all_gather = SelfGather;
  transport.probe = SelfProbe;
  transport.plain_all_reduce = SelfAllReduce;
  transport.last_error = SelfError;
  transport.destroy = SelfDestroy;
  return transport;
}

void* AllocateWork(void* user, const uint64_t* rows_by_rank, int size) {
  auto* work = static_cast<ddl_work*>(user);
  uint64_t rows = 0;
  for (int r = 0; r < size; ++r) rows += rows_by_rank[r];
  return ddl::GuardMemory(
      [&]() -> void* {
        work->rows.assign(rows_by_rank, rows_by_rank + size);
        if (work->allocate != nullptr) return work->allocate(work->allocate_user, rows_by_rank, size);
        // One extra byte, so that an empty result has an address too.
        work->data.resize(rows * work->row_count * work->element_bytes + 1);
        return work->data.data();
      },
      [](const std::exception&) -> void* { return nullptr; });
}

void FinishWork(void* user, const ddl_failure* failure) {
  auto* work = static_cast<ddl_work*>(user);
  {
    const std::lock_guard<std::mutex> lock(work->mutex);
    if (failure != nullptr) {
      work->failure.code = failure->code;
      // If memory is short, the code alone is enough.
      if (ddl::Completes([&] { work->copy = new ddl::FailureCopy(*failure); })) work->failure = *work->copy;
    }
    work->done = true;
    work->changed.notify_all();
  }
  work->Release();
}

int Report(const ddl::Status& status, char* error, size_t error_bytes) {
  std::snprintf(error, error_bytes, "%s", status.message().c_str());
  return status.code();
}

// Submits `request`, whose `done` is called exactly once in any case.
void Submit(ddl_comm* comm, const ddl_request& request, bool result_on_host = false) {
  const ddl::Status submitted = ddl::GuardedStatus([&] {
    comm->engine->Submit(request, result_on_host);
    return ddl::Status();
  });
  if (!submitted.ok()) ddl::CallDone(request.done, request.user, request.name, submitted);
}

}  // namespace

extern "C" {

uint32_t ddl_abi_version(void) { return DDL_ABI_VERSION; }

ddl_comm* ddl_create(const ddl_transport* transport, const ddl_options* options, char* error, size_t error_bytes) {
  const ddl_transport used = transport != nullptr ? *transport : SelfTransport();
  if (used.abi_version != DDL_ABI_VERSION || options->abi_version != DDL_ABI_VERSION) {
    std::snprintf(error, error_bytes,
                  "the libraries of keras_ddl do not match: core ABI %u, transport %u, options "
                  "%u. Reinstall keras_ddl.",
                  DDL_ABI_VERSION, used.abi_version, options->abi_version);
    if (used.destroy != nullptr) used.destroy(used.self);
    return nullptr;
  }
  return ddl::GuardMemory(
      [&]() -> ddl_comm* {
        auto comm = std::make_unique<ddl_comm>();
        const ddl::Status status = ddl::Engine::Create(used, *options, &comm->engine);
        if (status.ok()) return comm.release();
        Report(status, error, error_bytes);
        return nullptr;
      },
      [&](const std::exception& failure) -> ddl_comm* {  // the transport leaks: its owner is not known here
        std::snprintf(error, error_bytes, "no communicator could be made: %s", failure.what());
        return nullptr;
      });
}

int ddl_add_lane(ddl_comm* comm, const ddl_transport* transport, const ddl_options* options, char* error,
                 size_t error_bytes) {
  return ddl::GuardMemory(
      [&]() -> int {
        const ddl::Status status = comm->engine->AddLane(*transport, *options);
        return status.ok() ? static_cast<int>(DDL_OK) : Report(status, error, error_bytes);
      },
      [&](const std::exception& failure) -> int {  // the transport leaks: its owner is not known here
        std::snprintf(error, error_bytes, "no lane could be made: %s", failure.what());
        return DDL_INTERNAL;
      });
}

void ddl_close(ddl_comm* comm) { comm->engine->Close(); }
void ddl_hold(ddl_comm* comm) { comm->holders.fetch_add(1); }
void ddl_release(ddl_comm* comm) {
  if (comm->holders.fetch_sub(1) == 1) delete comm;
}
void ddl_destroy(ddl_comm* comm) {
  ddl_close(comm);
  ddl_release(comm);
}

int ddl_rank(const ddl_comm* comm) { return comm->engine->rank(); }
int ddl_size(const ddl_comm* comm) { return comm->engine->size(); }
int ddl_local_rank(const ddl_comm* comm) { return comm->engine->local_rank(); }
int ddl_local_size(const ddl_comm* comm) { return comm->engine->local_size(); }
const char* ddl_describe(const ddl_comm* comm) { return comm->engine->description(); }
void ddl_count(const ddl_comm* comm, ddl_counters* counters) { *counters = comm->engine->counters(); }

int ddl_wait_for_position_query(ddl_comm* comm) { return comm->engine->stack_position().WaitForQuery() ? 1 : 0; }
void ddl_reply_position(ddl_comm* comm, const char* text) {
  std::string reply;
  // If memory is short, "" says that the position is not known.
  if (ddl::Completes([&] { reply = text; })) {
    // A request that waits in another communicator may be what the program needs to continue.
    const std::lock_guard<std::mutex> lock(published_mutex);
    const bool elsewhere = std::any_of(published.begin(), published.end(), [&](const auto& other) {
      return other.second != comm && other.second->engine->HasOutstanding();
    });
    if (elsewhere) reply.resize(std::min(reply.size(), reply.find('\x1f')));
  }
  comm->engine->stack_position().Reply(std::move(reply));
  comm->engine->OnPositionKnown();
}

void ddl_submit(ddl_comm* comm, const ddl_request* request) { Submit(comm, *request); }

int ddl_try_run(ddl_comm* comm, const ddl_request* request, uint32_t patience_us) {
  // TryRun throws only before it has begun.
  return ddl::GuardMemory([&] { return comm->engine->TryRun(*request, patience_us); },
                          [](const std::exception&) { return 0; });
}

void* ddl_allocate_in_place(void* user, const uint64_t* rows_by_rank, int size) {
  const auto* place = static_cast<const ddl_place*>(user);
  uint64_t rows = 0;
  for (int r = 0; r < size; ++r) rows += rows_by_rank[r];
  return rows == place->rows ? place->out : nullptr;
}

ddl_work* ddl_start(ddl_comm* comm, const ddl_request* request) {
  auto* work = new (std::nothrow) ddl_work();
  if (work == nullptr) return nullptr;
  ddl_request own = *request;
  if (own.dtype < DDL_NUM_DTYPES) work->element_bytes = ddl::DtypeSize(static_cast<ddl_dtype>(own.dtype));
  work->row_count = own.row_count;
  work->allocate = own.allocate;
  work->allocate_user = own.user;
  own.allocate = AllocateWork;
  own.done = FinishWork;
  own.user = work;
  Submit(comm, own, work->allocate == nullptr);
  return work;
}

int ddl_work_wait(ddl_work* work, int timeout_ms) {
  std::unique_lock<std::mutex> lock(work->mutex);
  const auto is_done = [work] { return work->done; };
  if (timeout_ms < 0) {
    ddl::Wait(work->changed, lock, is_done);
    return 1;
  }
  return work->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done) ? 1 : 0;
}

const ddl_failure* ddl_work_failure(const ddl_work* work) {
  return work->failure.code == DDL_OK ? nullptr : &work->failure;
}
const void* ddl_work_data(const ddl_work* work) { return work->data.data(); }
const uint64_t* ddl_work_rows(const ddl_work* work) { return work->rows.data(); }
void ddl_work_free(ddl_work* work) { work->Release(); }

void ddl_publish(int64_t id, ddl_comm* comm) {
  UnlockPublishedInForkedChildren();
  const std::lock_guard<std::mutex> lock(published_mutex);
  if (comm != nullptr) {
    // If memory is short, the communicator cannot be found, as before this call.
    (void)ddl::Completes([&] { published[id] = comm; });
  } else {
    published.erase(id);
  }
}
ddl_comm* ddl_find(int64_t id) {
  const std::lock_guard<std::mutex> lock(published_mutex);
  const auto at = published.find(id);
  if (at == published.end()) return nullptr;
  at->second->holders.fetch_add(1);
  return at->second;
}

int ddl_trace_start(const char* path, int rank, const char* label, char* error, size_t error_bytes) {
  return Report(ddl::GuardedStatus([&] { return ddl::Trace::Start(path, rank, label); }), error, error_bytes);
}
int ddl_trace_stop(char* error, size_t error_bytes) {
  return Report(ddl::GuardedStatus(ddl::Trace::Stop), error, error_bytes);
}
void ddl_trace_span(const char* name, double begin_s, double end_s) { ddl::Trace::Span(name, begin_s, end_s); }
void ddl_trace_keep(uint32_t capacity) { ddl::Trace::Keep(capacity); }
uint32_t ddl_trace_take(ddl_traced* out, uint32_t count) { return ddl::Trace::Take(out, count); }

}  // extern "C"
