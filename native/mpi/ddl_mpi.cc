#include "ddl_mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "at_exit.h"
#include "leaving.h"
#include "mpi_include.h"
#include "plain_all_reduce.h"

namespace ddl_mpi {
namespace {

// The count of an MPI call is an int: a longer message is split into pieces, which MPI keeps in order.
constexpr size_t kPieceBytes = size_t{1} << 30;

// How long `destroy` waits for abandoned operations to finish.
constexpr double kDrainSeconds = 0.2;

// How long cancelling one operation may take.
constexpr double kCancelSeconds = 0.02;

struct Operation {
  bool receives = false;
  size_t index = 0;  // in Transport::operations_
  MPI_Request first = MPI_REQUEST_NULL;
  std::vector<MPI_Request> rest;  // only of a message above kPieceBytes
};

std::string ErrorText(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS || length == 0) return "error " + std::to_string(code);
  return std::string(text, static_cast<size_t>(length));
}

class Transport {
 public:
  Transport(MPI_Comm comm, int rank) : comm_(comm), rank_(rank) {}

  MPI_Comm comm() const { return comm_; }

  // The functions of ddl_transport.
  static int AllGather(void* self, const void* in, void* out, size_t bytes);
  static int Isend(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation);
  static int Irecv(void* self, int peer, int tag, void* buffer, size_t bytes, void** operation);
  static int Test(void* self, void** operation, int* finished);
  static int Cancel(void* self, void** operation);
  static int Probe(void* self, int tag, int* peer, size_t* bytes);
  static int PlainAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op);
  static const char* LastError(void* self) { return Of(self)->error_.c_str(); }
  static void Destroy(void* self);

 private:
  static Transport* Of(void* self) { return static_cast<Transport*>(self); }

  // Starts the requests of one message; `start` makes the request of the piece [at, at + length).
  template <typename Start>
  int StartPieces(bool receives, int peer, size_t bytes, void** operation, Start start);
  static void CancelPieces(Operation* operation);
  static int TestPieces(Operation* operation, int* finished);
  void Forget(Operation* operation);
  // Cancels receives and gives sends a moment to finish, because after a failure nobody has waited for them. Returns
  // whether all have ended.
  bool Drain();
  // Keeps "rank 1: MPI_Isend, peer 2, 64 bytes: <text of MPI>" and returns the ddl_code.
  int Fail(int code, const char* call, int peer, uint64_t amount, const char* unit);

  const MPI_Comm comm_;
  const int rank_;
  std::string error_;
  std::vector<Operation*> operations_;  // started and not finished
};

int Transport::Fail(int code, const char* call, int peer, uint64_t amount, const char* unit) {
  error_ = "rank " + std::to_string(rank_) + ": " + call;
  if (peer >= 0) error_ += ", peer " + std::to_string(peer);
  error_ += ", " + std::to_string(amount) + " " + unit + ": " + ErrorText(code);
#ifdef MPIX_ERR_PROC_FAILED
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  if (error_class == MPIX_ERR_PROC_FAILED || error_class == MPIX_ERR_REVOKED) return DDL_ABORTED;
#endif
  return DDL_INTERNAL;
}

int Transport::AllGather(void* self, const void* in, void* out, size_t bytes) {
  Transport* const t = Of(self);
  if (bytes > INT_MAX) return t->Fail(MPI_ERR_COUNT, "MPI_Allgather", -1, bytes, "bytes");
  const int n = static_cast<int>(bytes);
  const int code = MPI_Allgather(in, n, MPI_BYTE, out, n, MPI_BYTE, t->comm_);
  return code == MPI_SUCCESS ? DDL_OK : t->Fail(code, "MPI_Allgather", -1, bytes, "bytes");
}

template <typename Start>
int Transport::StartPieces(bool receives, int peer, size_t bytes, void** operation, Start start) {
  const char* const call = receives ? "MPI_Irecv" : "MPI_Isend";
  Operation* const started = new (std::nothrow) Operation;
  if (started == nullptr) return Fail(MPI_ERR_NO_MEM, call, peer, bytes, "bytes");
  started->receives = receives;
  started->index = operations_.size();
  operations_.push_back(started);  // also when a later piece fails: MPI has the memory of the earlier ones
  int code = start(size_t{0}, static_cast<int>(std::min(bytes, kPieceBytes)), &started->first);
  for (size_t at = kPieceBytes; at < bytes && code == MPI_SUCCESS; at += kPieceBytes) {
    started->rest.push_back(MPI_REQUEST_NULL);
    code = start(at, static_cast<int>(std::min(bytes - at, kPieceBytes)), &started->rest.back());
  }
  if (code != MPI_SUCCESS) return Fail(code, call, peer, bytes, "bytes");
  *operation = started;
  return DDL_OK;
}

int Transport::Isend(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation) {
  Transport* const t = Of(self);
  const char* const data = static_cast<const char*>(buffer);
  return t->StartPieces(false, peer, bytes, operation, [&](size_t at, int length, MPI_Request* request) {
    return MPI_Isend(data + at, length, MPI_BYTE, peer, tag, t->comm_, request);
  });
}

int Transport::Irecv(void* self, int peer, int tag, void* buffer, size_t bytes, void** operation) {
  Transport* const t = Of(self);
  char* const data = static_cast<char*>(buffer);
  return t->StartPieces(true, peer, bytes, operation, [&](size_t at, int length, MPI_Request* request) {
    return MPI_Irecv(data + at, length, MPI_BYTE, peer, tag, t->comm_, request);
  });
}

// A finished request becomes MPI_REQUEST_NULL, which tests as finished, so this may be called again.
int Transport::TestPieces(Operation* operation, int* finished) {
  int code = MPI_Test(&operation->first, finished, MPI_STATUS_IGNORE);
  for (MPI_Request& request : operation->rest) {
    if (code != MPI_SUCCESS || !*finished) break;
    code = MPI_Test(&request, finished, MPI_STATUS_IGNORE);
  }
  if (code != MPI_SUCCESS) *finished = 0;
  return code;
}

void Transport::Forget(Operation* operation) {
  operations_.back()->index = operation->index;
  std::swap(operations_[operation->index], operations_.back());
  operations_.pop_back();
  delete operation;
}

int Transport::Test(void* self, void** operation, int* finished) {
  Transport* const t = Of(self);
  Operation* const tested = static_cast<Operation*>(*operation);
  const int code = TestPieces(tested, finished);
  if (code != MPI_SUCCESS) {
    return t->Fail(code, tested->receives ? "MPI_Test of a receive" : "MPI_Test of a send", -1, 1 + tested->rest.size(),
                   "requests");
  }
  if (*finished) {
    t->Forget(tested);
    *operation = nullptr;
  }
  return DDL_OK;
}

// Sends are not cancelled: MPI has deprecated it, and Open MPI does nothing.
void Transport::CancelPieces(Operation* operation) {
  if (!operation->receives) return;
  if (operation->first != MPI_REQUEST_NULL) MPI_Cancel(&operation->first);
  for (MPI_Request& request : operation->rest) {
    if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  }
}

int Transport::Cancel(void* self, void** operation) {
  Transport* const t = Of(self);
  Operation* const cancelled = static_cast<Operation*>(*operation);
  CancelPieces(cancelled);
  const double end = MPI_Wtime() + kCancelSeconds;
  do {
    int finished = 0;
    const int code = TestPieces(cancelled, &finished);
    if (code != MPI_SUCCESS) return t->Fail(code, "MPI_Cancel", -1, 1 + cancelled->rest.size(), "requests");
    if (finished) {
      t->Forget(cancelled);
      *operation = nullptr;
      return DDL_OK;
    }
  } while (MPI_Wtime() < end);
  return DDL_DEADLINE_EXCEEDED;
}

bool Transport::Drain() {
  for (Operation* operation : operations_) CancelPieces(operation);
  const double end = MPI_Wtime() + kDrainSeconds;
  while (!operations_.empty() && MPI_Wtime() < end) {
    for (size_t i = operations_.size(); i-- > 0;) {
      int finished = 0;
      if (TestPieces(operations_[i], &finished) != MPI_SUCCESS || finished) Forget(operations_[i]);
    }
  }
  const bool all = operations_.empty();
  while (!operations_.empty()) Forget(operations_.back());
  return all;
}

int Transport::Probe(void* self, int tag, int* peer, size_t* bytes) {
  Transport* const t = Of(self);
  int found = 0;
  int length = 0;
  MPI_Status status;
  *peer = -1;
  *bytes = 0;
  // No MPI_Improbe: one thread probes and receives, so nobody can take the message in between.
  int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, t->comm_, &found, &status);
  if (code == MPI_SUCCESS && found) code = MPI_Get_count(&status, MPI_BYTE, &length);
  if (code != MPI_SUCCESS) return t->Fail(code, "MPI_Iprobe", -1, static_cast<uint64_t>(tag), "(tag)");
  if (found) {
    *peer = status.MPI_SOURCE;
    *bytes = static_cast<size_t>(length);
  }
  return DDL_OK;
}

int Transport::PlainAllReduce(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op) {
  Transport* const t = Of(self);
  const char* call = "";
  const int code =
      ddl_mpi::PlainAllReduce(t->comm_, in, out, count, static_cast<ddl_dtype>(dtype), static_cast<ddl_op>(op), &call);
  return code == MPI_SUCCESS ? DDL_OK : t->Fail(code, call, -1, count, "elements");
}

void Transport::Destroy(void* self) {
  Transport* const t = Of(self);
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) {
    const bool clean = t->Drain();
    // The consensus at the end of the process uses this communicator.
    if (!IsOfConsensus(t->comm_)) Leave(t->comm_, clean);
  }
  delete t;
}

void SetError(char* error, size_t error_bytes, const std::string& text) {
  if (error_bytes > 0) std::snprintf(error, error_bytes, "%s", text.c_str());
}

// Fills *out over `comm`, which it takes over. `code`: the result of the MPI function `call` that made `comm`. A
// failure is reported, and then nothing is held.
int Fill(MPI_Comm comm, int code, const char* call, ddl_transport* out, char* error, size_t error_bytes) {
  int rank = 0;
  int size = 0;
  if (code == MPI_SUCCESS) {
    call = "MPI_Comm_set_errhandler";
    code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(comm, &rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(comm, &size);
  }
  Transport* const transport = code == MPI_SUCCESS ? new (std::nothrow) Transport(comm, rank) : nullptr;
  if (transport == nullptr) {
    SetError(error, error_bytes, std::string(call) + ": " + (code == MPI_SUCCESS ? "out of memory" : ErrorText(code)));
    if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
    return DDL_INTERNAL;
  }
  *out = {};
  out->abi_version = DDL_ABI_VERSION;
  out->rank = rank;
  out->size = size;
  out->self = transport;
  out->all_gather = &Transport::AllGather;
  out->isend = &Transport::Isend;
  out->irecv = &Transport::Irecv;
  out->test = &Transport::Test;
  out->cancel = &Transport::Cancel;
  out->probe = &Transport::Probe;
  out->plain_all_reduce = &Transport::PlainAllReduce;
  out->last_error = &Transport::LastError;
  out->lost_rank = nullptr;
  out->share = nullptr;
  out->destroy = &Transport::Destroy;
  return DDL_OK;
}

}  // namespace
}  // namespace ddl_mpi

int ddl_mpi_create(int fortran_comm, ddl_transport* out, char* error, size_t error_bytes) {
  using ddl_mpi::SetError;
  using ddl_mpi::Transport;
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (!initialized || finalized) {
    SetError(error, error_bytes,
             std::string("MPI must be initialised and not yet finalised in the MPI library that keras_ddl uses (") +
                 ddl_mpi_loaded_path() + "). Received: " + (finalized ? "finalised" : "not initialised") +
                 ". Another MPI library may have been initialised instead.");
    return DDL_FAILED_PRECONDITION;
  }
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) {
    SetError(error, error_bytes,
             "MPI must be initialised with MPI_THREAD_MULTIPLE (" + std::to_string(MPI_THREAD_MULTIPLE) +
                 "), because the communication thread calls MPI while other threads do. Received: thread level " +
                 std::to_string(level) +
                 ". Call keras_ddl.init() before anything else initialises MPI, or ask for MPI_THREAD_MULTIPLE there.");
    return DDL_FAILED_PRECONDITION;
  }

  ddl_mpi::FreeLeftCommunicators();
  MPI_Comm comm = MPI_COMM_NULL;
  const int code = MPI_Comm_dup(MPI_Comm_f2c(fortran_comm), &comm);
  const int filled = ddl_mpi::Fill(comm, code, "MPI_Comm_dup", out, error, error_bytes);
  if (filled == DDL_OK) ddl_mpi::AgreeOnExitStatusOver(comm);
  return filled;
}

int ddl_mpi_split(const ddl_transport* parent, const int* ranks, int num_ranks, int tag, ddl_transport* out,
                  char* error, size_t error_bytes) {
  ddl_mpi::FreeLeftCommunicators();
  const MPI_Comm whole = static_cast<ddl_mpi::Transport*>(parent->self)->comm();
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  int code = MPI_Comm_group(whole, &all);
  if (code == MPI_SUCCESS) code = MPI_Group_incl(all, num_ranks, ranks, &some);
  // Unlike MPI_Comm_split, only the ranks that take part call it, and several threads may call it with different tags.
  if (code == MPI_SUCCESS) code = MPI_Comm_create_group(whole, some, tag, &comm);
  if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
  if (all != MPI_GROUP_NULL) MPI_Group_free(&all);
  return ddl_mpi::Fill(comm, code, "MPI_Comm_create_group", out, error, error_bytes);
}

int ddl_mpi_handle(const ddl_transport* transport) {
  return MPI_Comm_c2f(static_cast<ddl_mpi::Transport*>(transport->self)->comm());
}

void ddl_mpi_leave(const ddl_transport* transport, int clean) {
  ddl_mpi::Transport* const left = static_cast<ddl_mpi::Transport*>(transport->self);
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) ddl_mpi::Leave(left->comm(), clean != 0);
  delete left;
}

const char* ddl_mpi_library(void) {
#if defined(OPEN_MPI)
  return "Open MPI";
#else
  return "MPICH";
#endif
}

const char* ddl_mpi_loaded_version(void) {
  static const std::string version = [] {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string all(text);
    return all.substr(0, std::min(all.find('\n'), all.find(',')));
  }();
  return version.c_str();
}

const char* ddl_mpi_loaded_path(void) {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init), &info) == 0 || info.dli_fname == nullptr) return "";
  return info.dli_fname;
}

const char* ddl_mpi_site_launcher(void) { return KERAS_DDL_SITE_LAUNCHER; }
