// ddl.h: the C ABI of libkeras_ddl, the only way into the native core.
//
// A communicator is one rank's end of a group of ranks. It owns one communication thread, on which every collective
// runs. Ranks are processes in production and may be threads of one process in tests, so nothing here is global except
// the list of published communicators, in which bindings (native/tf) look them up.
//
// Contract of every collective: all ranks submit a request of the same `name`; the order of submission may differ
// between ranks and threads. Requests are matched by name (several under one name: first in, first matched). Kind,
// dtype, op, compression, root, flags, fingerprint and element count (except in DDL_ALL_GATHER and DDL_ALL_TO_ALL,
// whose rows are free) must be equal on all ranks. If not, the request fails with DDL_FAILED_PRECONDITION on EVERY rank
// with one message that names the ranks and both values, and the communicator stays usable. The same happens, with
// DDL_INVALID_ARGUMENT, if on some rank the splits of an all_to_all do not add up to its rows. Results are bitwise
// equal on all ranks and from run to run for one topology.
//
// A rank that has no more data joins (DDL_JOIN). From then on no collective waits for it: it contributes neutral data
// to what the others submit (zeros; ones in a product; the largest or smallest number in a min or max; no rows in an
// all_gather) and discards the results. A mean still divides by the number of all ranks. A collective that needs a rank
// that has joined (the root of a broadcast; every rank in an all_to_all, an adaptive sum or with DDL_FLAG_ALL_RANKS)
// fails with DDL_FAILED_PRECONDITION on the ranks that submitted it. So does every request that a rank submits after it
// has joined. When all ranks have joined, all of them continue as before.
//
// A rank that fails between two collectives tells the others by a collective with DDL_FLAG_CANCELS, which all ranks
// then submit. From the first submission until a collective with DDL_FLAG_RESUMES is decided, all collectives without
// these flags that were not decided before fail with DDL_CANCELLED, on every rank that submits them. A rank submits the
// collective with DDL_FLAG_RESUMES when it has no other pending request that it wants cancelled. Afterwards all ranks
// continue as before.
//
// Callbacks (`done`, `allocate`, `warn`) run on the communication thread. It is bound to some of the process's cores
// and may run at a higher priority. A new thread inherits both from the thread that starts it: do not start threads in
// a callback.
//
// No function throws. All functions may be called from any thread unless their comment says otherwise. If memory is
// short on the calling thread, a function fails as documented (DDL_INTERNAL, "out of memory"). If it is short on a
// communication thread, the running collective fails; between collectives, the process ends.
#ifndef KERAS_DDL_DDL_H_
#define KERAS_DDL_DDL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "keras_ddl runs on POSIX systems"
#endif
#define DDL_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Incremented whenever a struct or function below changes, or the format of messages between ranks. Bindings and ranks
// reject any other number.
#define DDL_ABI_VERSION 16

// Numbers equal those of TF_Code and absl::StatusCode, so a binding passes them through.
typedef enum ddl_code {
  DDL_OK = 0,
  DDL_CANCELLED = 1,            // another rank has submitted a collective with DDL_FLAG_CANCELS
  DDL_INVALID_ARGUMENT = 3,     // a request that no rank could run, or wrong splits of some rank
  DDL_DEADLINE_EXCEEDED = 4,    // ranks that did not arrive before the deadline
  DDL_NOT_FOUND = 5,            // a communicator that does not exist, or was shut down
  DDL_FAILED_PRECONDITION = 9,  // ranks that disagree, or a request after this rank joined
  DDL_ABORTED = 10,             // a rank died, or its link to the others broke
  DDL_INTERNAL = 13,            // a bug, or an error of the operating system or of MPI
  DDL_UNAVAILABLE = 14,         // a rank left: it closed the communicator, as every rank does when its process ends
  DDL_DATA_LOSS = 15,           // the `check` comparison failed
} ddl_code;

// What a failure says about a rank.
typedef enum ddl_rank_role {
  DDL_RANK_DIED = 0,    // its process or its connection ended unexpectedly
  DDL_RANK_LEFT = 1,    // it closed the communicator
  DDL_RANK_SILENT = 2,  // it, or its host, shows no sign of life
  DDL_RANK_NAMED = 3,   // none of these: it disagrees, is late, gave up, ...
} ddl_rank_role;
typedef struct ddl_failed_rank {
  int32_t rank;   // of the communicator
  uint32_t role;  // ddl_rank_role
} ddl_failed_rank;

// Why a function or a request failed. Programs read these fields; the message is for people and may be reworded.
typedef struct ddl_failure {
  int32_t code;        // ddl_code, never DDL_OK
  uint32_t num_ranks;  // 0 if no rank is known to be concerned
  const ddl_failed_rank* ranks;
  const char* message;   // UTF-8, never NULL
  const char* name;      // of the request that failed; "" for a join, or if no request failed
  int64_t communicator;  // the number under which it is published, if a binding has set it (ddl_keep_failure)
} ddl_failure;

typedef enum ddl_dtype {
  DDL_FLOAT32 = 0,
  DDL_FLOAT64 = 1,
  DDL_FLOAT16 = 2,
  DDL_BFLOAT16 = 3,
  DDL_INT32 = 4,
  DDL_INT64 = 5,
  DDL_UINT8 = 6,
  DDL_INT8 = 7,
  DDL_NUM_DTYPES = 8,
} ddl_dtype;

typedef enum ddl_op {
  DDL_SUM = 0,
  DDL_MEAN = 1,  // integers: the exact sum divided by the number of ranks, rounded toward zero (int64: the sum wraps)
  DDL_MIN = 2,
  DDL_MAX = 3,
  DDL_PRODUCT = 4,
  DDL_ADASUM = 5,  // DDL_ALL_REDUCE of floating dtypes: a separate adaptive sum (arXiv 2006.02924) of each buffer
  DDL_NUM_OPS = 6,
} ddl_op;

typedef enum ddl_kind {
  DDL_ALL_REDUCE = 0,
  DDL_BROADCAST = 1,
  DDL_REDUCE_SCATTER = 2,
  DDL_ALL_GATHER = 3,
  DDL_BARRIER = 4,
  DDL_JOIN = 5,        // done when all ranks have joined; see above. No deadline. Joining again changes nothing
  DDL_ALL_TO_ALL = 6,  // every rank sends each rank some of its rows; the result is in the order of the senders
  DDL_NUM_KINDS = 7,
} ddl_kind;

// Rounds float32 data of an all-reduce to 16 bits while it travels between groups. Sums are still in float32.
typedef enum ddl_compression {
  DDL_COMPRESSION_NONE = 0,
  DDL_COMPRESSION_BFLOAT16 = 1,
  DDL_COMPRESSION_FLOAT16 = 2,  // scaled by powers of two, so that nothing overflows
  DDL_NUM_COMPRESSIONS = 3,
} ddl_compression;

// Flags of a request.
#define DDL_FLAG_PLAIN_MPI 1u  // DDL_ALL_REDUCE by the transport's own MPI_Allreduce, as a baseline
#define DDL_FLAG_CHECK 2u      // DDL_ALL_REDUCE, then compare with the baseline within `tolerance`
#define DDL_FLAG_BLOCKING 4u   // the submitting rank's main thread does nothing else until this is done
#define DDL_FLAG_ALL_RANKS 8u  // the result is meaningless without every rank's data: fail while some have joined
#define DDL_FLAG_CANCELS 16u   // see "A rank that fails" above
#define DDL_FLAG_RESUMES 32u

// Where memory is. All fields zero: the host's memory.
typedef enum ddl_device_kind {
  DDL_HOST = 0,
  DDL_CUDA = 1,
} ddl_device_kind;
typedef struct ddl_location {
  uint32_t kind;  // ddl_device_kind
  int32_t id;     // the runtime's number of the device in this process; 0 for DDL_HOST
} ddl_location;

// Reads `count` elements from `in` and writes the result to `out`, which equals `in` or does not overlap it. Need not
// be aligned.
typedef struct ddl_buffer {
  const void* in;
  void* out;
  uint64_t count;
  // Of `in` and `out`. A device must be that of ddl_add_device. The memory that `allocate` returns has the location of
  // the only buffer; without `allocate`, the result is in the host's memory.
  ddl_location location;
} ddl_buffer;

typedef struct ddl_comm ddl_comm;
typedef struct ddl_work ddl_work;

typedef struct ddl_request {
  uint32_t kind;   // ddl_kind
  uint32_t dtype;  // ddl_dtype
  uint32_t op;     // ddl_op; read by DDL_ALL_REDUCE and DDL_REDUCE_SCATTER only
  int32_t root;    // read by DDL_BROADCAST only
  uint32_t flags;
  // ddl_compression; DDL_ALL_REDUCE of DDL_FLOAT32 by DDL_SUM or DDL_MEAN, without DDL_FLAG_PLAIN_MPI. Has no effect if
  // all ranks share memory.
  uint32_t compression;
  uint32_t num_buffers;       // DDL_ALL_REDUCE, DDL_BROADCAST: any; DDL_BARRIER: 0; others: 1
  const ddl_buffer* buffers;  // reduced as if concatenated (DDL_ADASUM: see there; counts agree). Copied by ddl_submit;
                              // the memory they point to must stay valid until `done`. DDL_ALL_GATHER, DDL_ALL_TO_ALL:
                              // in, count; out is NULL. DDL_REDUCE_SCATTER: in, count of the whole input; out has this
                              // rank's chunk. DDL_JOIN: count 1; out receives an int32_t, the rank that joined last.
  // DDL_REDUCE_SCATTER, DDL_ALL_GATHER, DDL_ALL_TO_ALL:
  uint64_t row_count;     // elements of a row (product of dims 1..), equal on all ranks; may be 0
  uint64_t rows;          // rows (dim 0) of this rank's input; count is rows * row_count
  const int64_t* splits;  // DDL_ALL_TO_ALL: rows that go to each rank (`size` entries), the first ones to rank 0 and
                          // so on. Copied by ddl_submit. 0 or more, adding up to `rows`.
  uint64_t fingerprint;   // any hash that ranks must agree on (shapes, plan); 0 for none
  uint64_t step;  // one number for all requests that one run of a graph makes on this rank. When one of these requests
                  // fails, those that still wait for other ranks and those submitted later fail, too. 0: this request
                  // stands alone. Need not be equal on all ranks.
  double tolerance;    // with DDL_FLAG_CHECK: max |a - b| <= tolerance * max(1, |b|)
  const char* name;    // match key, UTF-8, 1..1023 bytes; not read by DDL_JOIN
  const char* detail;  // shown in error messages (shapes, tensor names); may be NULL; cut after 1023 bytes
  // With `compression`: the key under which this rank keeps its rounding errors and adds them to the next request with
  // the same key and count; NULL or "": the errors are lost. Up to 1,023 bytes; need not be equal on all ranks. The
  // most recently used errors are kept within ddl_options.feedback_bytes; they take 4/L bytes per element, with L ranks
  // in a group.
  const char* feedback;
  // DDL_ALL_GATHER, DDL_ALL_TO_ALL: called once on the communication thread (start no thread here, see above) when the
  // sizes are known: the rows that this rank gets from each. Returns the output of sum(rows_by_rank) * row_count
  // elements, or NULL to fail the request. NULL: ddl_start allocates (ddl_work_data).
  void* (*allocate)(void* user, const uint64_t* rows_by_rank, int size);
  // Called exactly once, on the communication thread (or in ddl_submit when the request is refused). `failure`: NULL
  // when the request succeeded; valid during the call. Must not block, must not start a thread (see above), and must
  // not call back into the communicator except ddl_submit.
  void (*done)(void* user, const ddl_failure* failure);
  // ddl_try_run only; may be NULL. Called on the calling thread several times a second during a long collective.
  // Returns non-zero if the caller should return, as on Ctrl-C. If the collective does not end within a second after
  // that, it and the communicator are given up (DDL_ABORTED on all ranks).
  int (*interrupted)(void* user);
  void* user;
  // DDL_ALL_REDUCE, DDL_ALL_GATHER, DDL_ALL_TO_ALL in a communicator that has a lane: this is collective `plan_index`
  // of the `plan_size` collectives in every run of a plan (0: no plan), in an order in which they can run: none needs
  // the result of a later one. A DDL_ALL_GATHER runs by plan if all ranks have equally many rows. `plan`: a hash of the
  // plan's collectives, equal on all ranks. `plan_run`: a number of one run of the plan on this rank, such as `step`.
  // The next run has another number, or begins with an index that has already come.
  uint64_t plan;
  uint64_t plan_run;
  uint32_t plan_index;
  uint32_t plan_size;
  // With buffers on a device: the stream (a CUstream) whose work at submission makes the buffers ready, and whose work
  // after `allocate` makes its memory ready; NULL: the device's default stream. When `done` is called, the results are
  // ready for every stream.
  void* stream;
} ddl_request;

// How ranks that do not share memory communicate, and how ranks exchange start-up data. A bootstrap library
// (native/mpi) or a test fills it. All functions return DDL_OK or another ddl_code. Only ddl_create and ddl_add_lane
// call `all_gather`, on their thread; only the communication thread calls the other functions.
typedef struct ddl_transport {
  uint32_t abi_version;
  int rank;
  int size;
  void* self;
  int (*all_gather)(void* self, const void* in, void* out, size_t bytes);
  int (*isend)(void* self, int peer, int tag, const void* buffer, size_t bytes, void** operation);
  int (*irecv)(void* self, int peer, int tag, void* buffer, size_t bytes, void** operation);
  // Sets *finished; a finished operation is freed and *operation becomes NULL.
  int (*test)(void* self, void** operation, int* finished);
  // Cancels an operation. DDL_OK: it was cancelled or has finished, its memory is the caller's again, and *operation
  // becomes NULL. Any other code: the transport may use the memory until the process ends, and keeps the operation.
  // Takes at most some tens of milliseconds.
  int (*cancel)(void* self, void** operation);
  // Looks for a message of `tag` from any peer; *peer = -1 when there is none.
  int (*probe)(void* self, int tag, int* peer, size_t* bytes);
  // The library's own blocking all-reduce on contiguous memory: the baseline. COLLECTIVE over all ranks.
  int (*plain_all_reduce)(void* self, const void* in, void* out, uint64_t count, uint32_t dtype, uint32_t op);
  // Text of the last error; valid until the next call.
  const char* (*last_error)(void* self);
  // The rank whose loss made the last call fail; -1: none, or not known. NULL: never known.
  int (*lost_rank)(void* self);
  // Optional (NULL in production): memory of `bytes` zeroed bytes shared by all ranks of the group led by `leader`,
  // for ranks that are threads. Freed by `destroy`.
  void* (*share)(void* self, int leader, size_t bytes);
  // Frees everything the transport holds. Called by ddl_close, or by a failed ddl_create or ddl_add_lane, once.
  void (*destroy)(void* self);
} ddl_transport;

typedef struct ddl_options {
  uint32_t abi_version;
  // Ranks with equal entries share memory: group[r] is the lowest rank that shares memory with rank r. `size` entries.
  const int32_t* group;
  // The box that the groups form, in the order of their leaders: sizes of the outer dimensions, fastest first, e.g.
  // hosts of a rack, racks. Their product is the number of groups. num_outer 0: one dimension.
  const int32_t* outer;
  uint32_t num_outer;
  uint64_t staging_bytes;  // bound on the staging memory of one group; 0: 64 MiB
  // 1: ranks of a group reach each other's data through the staging memory only. 0: also directly (cross memory
  // attach), where the system lets them and that is faster.
  uint32_t staged_only;
  uint64_t feedback_bytes;  // bound on the errors kept for ddl_request.feedback, per rank; 0: 4 GiB. Need not be equal
  double warn_after_s;      // report missing ranks after this many seconds; 0: never
  double deadline_s;        // fail a request that is incomplete for this long; 0: never
  double lost_after_s;      // give up a host that shows no sign of life for this long, 1 or more; 0: never
  // Receives warnings (UTF-8, no newline), on the communication thread (start no thread here); NULL: stderr.
  void (*warn)(void* user, const char* message);
  void* warn_user;
} ddl_options;

DDL_EXPORT uint32_t ddl_abi_version(void);

// Makes a communicator. COLLECTIVE over all ranks of the transport, which it takes over even when it fails. On failure
// returns NULL and writes a message into `error` (size `error_bytes`).
DDL_EXPORT ddl_comm* ddl_create(const ddl_transport* transport, const ddl_options* options, char* error,
                                size_t error_bytes);

// Tells the other ranks that this one leaves (their pending and later requests fail with DDL_UNAVAILABLE), joins the
// communication thread and frees the transport. Requests of this rank fail with DDL_FAILED_PRECONDITION if they are
// pending, run for more than two further seconds, or are submitted later. Closing again changes nothing. Only the
// creator may call it, and not from a callback.
DDL_EXPORT void ddl_close(ddl_comm* comm);
// A communicator's memory lives until its creator and all holders (ddl_hold, ddl_find) have released it, so that a
// request submitted while its communicator shuts down fails cleanly. Not from a callback.
DDL_EXPORT void ddl_hold(ddl_comm* comm);
DDL_EXPORT void ddl_release(ddl_comm* comm);
// ddl_close, then ddl_release: for a creator that is the only user.
DDL_EXPORT void ddl_destroy(ddl_comm* comm);

// Adds a lane: a thread, connections and memory for collectives that follow a plan. They run in the plan's order, and
// no rank announces them to rank 0. Ranks compare what they run next (in shared memory; between hosts by small messages
// among neighbours). If they differ, or one has nothing to run for two seconds, the run of the plan falls back to the
// coordinator: its collectives are matched by name, with the same errors as without a plan. The lane belongs to the
// communicator and closes with it. COLLECTIVE over all ranks, once, with its own transport, which it takes over even
// when it fails. Returns a ddl_code.
DDL_EXPORT int ddl_add_lane(ddl_comm* comm, const ddl_transport* transport, const ddl_options* options, char* error,
                            size_t error_bytes);

// Gives the communicator this rank's device (ddl_device.h). From then on, device buffers must be on this device. Takes
// the device over even when it fails. COLLECTIVE over all ranks, once, from any thread; ranks may share a device.
// `name`: the match key of its own collectives. Returns a ddl_code; `failure` receives the number of the failure
// (ddl_find_failure).
//
// Buffers on a device pass through the host's memory, with the bits that the host would compute. Collectives that the
// device's library offers may run in that library instead, in its order of additions. An all-reduce may also run in
// both: the library reduces and scatters inside each host, each rank's share passes through its host's memory and the
// rings between hosts, and the library gathers. Where hosts have different numbers of ranks, that is not possible.
struct ddl_device;
typedef enum ddl_device_mode {
  // If each rank has its own device: on one host the library; on several hosts, for each kind and size class, whichever
  // of the three ways is fastest in the first collectives. Else through the host's memory.
  DDL_DEVICE_AUTO = 0,
  DDL_DEVICE_LIBRARY = 1,       // the library; fails if two ranks have the same device, or one has no library
  DDL_DEVICE_STAGED = 2,        // through the host's memory
  DDL_DEVICE_HIERARCHICAL = 3,  // the library inside hosts only; fails as above, or if it is not possible
} ddl_device_mode;
DDL_EXPORT int ddl_add_device(ddl_comm* comm, const struct ddl_device* device, uint32_t mode, const char* name,
                              uint64_t* failure);

DDL_EXPORT int ddl_rank(const ddl_comm* comm);
DDL_EXPORT int ddl_size(const ddl_comm* comm);
// Rank within, and size of, the group that shares memory.
DDL_EXPORT int ddl_local_rank(const ddl_comm* comm);
DDL_EXPORT int ddl_local_size(const ddl_comm* comm);

// Submits a request; its result arrives through `done`. Returns at once.
DDL_EXPORT void ddl_submit(ddl_comm* comm, const ddl_request* request);

// For callers that would wait anyway: runs the request on the calling thread if all ranks of the communicator share
// memory and all call this for the same collective within about `patience_us` microseconds. Returns 1 when done
// (request->done is not called), or 2 when done and the caller was interrupted meanwhile. Returns 0 when nothing was
// done, also for an invalid request: then submit it, unless the caller was interrupted. Cost when all ranks arrive
// together: about a microsecond plus the data.
DDL_EXPORT int ddl_try_run(ddl_comm* comm, const ddl_request* request, uint32_t patience_us);

// For `allocate`, with a ddl_place as `user`: returns the place if the rows of all ranks fill it exactly, else NULL.
typedef struct ddl_place {
  void* out;
  uint64_t row_count;  // that of the request
  uint64_t rows;       // of all ranks together
} ddl_place;
DDL_EXPORT void* ddl_allocate_in_place(void* user, const uint64_t* rows_by_rank, int size);

// The same as ddl_submit for callers that wait: request->done must be NULL; `allocate` may be NULL (see ddl_work_data).
// Free the work with ddl_work_free when ddl_work_wait has returned 1. (Freeing it earlier is safe for the library, but
// the caller's buffers must outlive the request.) Without memory for the work, returns NULL and submits nothing.
DDL_EXPORT ddl_work* ddl_start(ddl_comm* comm, const ddl_request* request);
// Waits up to `timeout_ms` (< 0: no limit); returns 1 when done, else 0.
DDL_EXPORT int ddl_work_wait(ddl_work* work, int timeout_ms);
// Returns why the work failed, or NULL if it succeeded. Valid until ddl_work_free. REQUIRES: the work is done.
DDL_EXPORT const ddl_failure* ddl_work_failure(const ddl_work* work);
// DDL_ALL_GATHER, DDL_ALL_TO_ALL without `allocate`: the elements of the result, and its number of rows from each rank
// (`size` entries).
DDL_EXPORT const void* ddl_work_data(const ddl_work* work);
DDL_EXPORT const uint64_t* ddl_work_rows(const ddl_work* work);
DDL_EXPORT void ddl_work_free(ddl_work* work);

// For bindings that can only pass on text (native/tf): keeps a copy of a failure, and returns a number to put into the
// text. Processes use different numbers. The newest 4,096 failures are kept. 0: no memory.
DDL_EXPORT uint64_t ddl_keep_failure(const ddl_failure* failure);
// Returns the failure with that number, or NULL. The caller releases it with ddl_release_failure.
DDL_EXPORT const ddl_failure* ddl_find_failure(uint64_t number);
DDL_EXPORT void ddl_release_failure(const ddl_failure* failure);

// Publishes a communicator for bindings under a number, which is the same on all of its ranks. The creator publishes
// it, and publishes NULL, which forgets the number, before ddl_close. If memory is short, it is not published.
#define DDL_WORLD 0  // the communicator of all ranks
DDL_EXPORT void ddl_publish(int64_t id, ddl_comm* comm);
// Returns the communicator with that number, or NULL. The caller releases it with ddl_release.
DDL_EXPORT ddl_comm* ddl_find(int64_t id);

// When a collective waits too long, rank 0 asks the missing ranks for their stack position. A thread that can inspect
// the program waits in ddl_wait_for_position_query, which returns 1 if there is a query and 0 if the communicator was
// closed. It replies with ddl_reply_position, e.g. "train.py:12 in step" (UTF-8; copied; "": not known). A suffix
// "\x1f4.2" says that for 4.2 seconds this process has certainly only waited for collectives; if ranks then wait for
// different collectives, these fail. Without such a thread, the rank reports only that it is alive.
DDL_EXPORT int ddl_wait_for_position_query(ddl_comm* comm);
DDL_EXPORT void ddl_reply_position(ddl_comm* comm, const char* text);

// What this communicator runs on: "shared memory: 2 ranks, AVX-512; ...". Valid until the caller's ddl_release.
DDL_EXPORT const char* ddl_describe(const ddl_comm* comm);

// Counters of this rank's end of a communicator, including its lane. Control messages are those between a rank and the
// coordinator (rank 0's end), without data, heartbeats, and anything that ranks of one host read in shared memory.
typedef struct ddl_counters {
  uint64_t control_sent;
  uint64_t control_received;
  uint64_t control_bytes_sent;
  uint64_t control_bytes_received;
  uint64_t coordinated;   // collectives that the coordinator has decided, including failed ones
  uint64_t ran_inline;    // collectives that calling threads ran themselves (ddl_try_run)
  uint64_t planned;       // collectives that ran by plan, without the coordinator
  uint64_t fell_back;     // planned collectives that the coordinator decided after all
  uint64_t staged;        // collectives whose data passed from a device through the host's memory
  uint64_t by_device;     // collectives that the device's library ran
  uint64_t hierarchical;  // all-reduces that the device's library ran inside hosts
} ddl_counters;
DDL_EXPORT void ddl_count(const ddl_comm* comm, ddl_counters* counters);

// A timeline of this process in the trace-event format of chrome://tracing and Perfetto, written to `path` from
// ddl_trace_start to ddl_trace_stop: all collectives of all communicators, and the spans that the program adds. `rank`
// and `label` name the process in the picture. Both return a ddl_code; on failure a message is in `error`.
DDL_EXPORT int ddl_trace_start(const char* path, int rank, const char* label, char* error, size_t error_bytes);
DDL_EXPORT int ddl_trace_stop(char* error, size_t error_bytes);
// Adds a span of the program, such as a training step. Seconds of CLOCK_MONOTONIC. Does nothing without a timeline.
DDL_EXPORT void ddl_trace_span(const char* name, double begin_s, double end_s);

// One collective of this process, as a timeline shows it, for a program that watches itself. Seconds of
// CLOCK_MONOTONIC.
typedef struct ddl_traced {
  char name[128];    // its last 127 bytes
  uint64_t bytes;    // of this rank's input
  double submitted;  // this rank had it ready
  double agreed;     // all ranks had it ready, as far as this rank was told
  double started;
  double finished;
} ddl_traced;
// From now on keeps the newest `capacity` collectives in memory, with or without a timeline. 0: keeps no more.
DDL_EXPORT void ddl_trace_keep(uint32_t capacity);
// Moves up to `count` of the kept collectives, oldest first, into `out`. Returns their number.
DDL_EXPORT uint32_t ddl_trace_take(ddl_traced* out, uint32_t count);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // KERAS_DDL_DDL_H_
