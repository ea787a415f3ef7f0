// Controls for the stand-ins for libcuda and libnccl. They are mocks, without a GPU, a driver or NCCL. They reproduce
// three properties: the host cannot read device memory, streams run late on their own threads, and NCCL works in the
// background. The real libraries do not have these functions.
#ifndef KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
#define KERAS_DDL_TESTS_DEVICE_STAND_IN_H_

#include <cstdint>
#include <functional>

#include "ddl.h"

// For the other stand-in: runs `task` on a stream (as in cuda.h), after its earlier tasks.
DDL_EXPORT void stand_in_enqueue(void* stream, std::function<void()> task);

extern "C" {

// Makes the next call of `function` fail, or with `always` all calls. It is a name of libcuda or libnccl, or
// "ncclAsync": the state that ncclCommGetAsyncError reports, also "ncclAsync in ncclAllGather" and the like.
DDL_EXPORT void stand_in_fail(const char* function, bool always);
// Cancels all requested failures.
DDL_EXPORT void stand_in_heal();
// For the other stand-in: whether `function` must fail now.
DDL_EXPORT bool stand_in_fails(const char* function);
// Returns the number of live "contexts", "streams", "events", "allocations", "registered", or of all "pageable"
// copies so far.
DDL_EXPORT int64_t stand_in_count(const char* what);
// Stops all copies to or from devices, as behind a kernel that does not end, until it is called with false.
DDL_EXPORT void stand_in_stall(bool stalled);

// Returns the host address behind device memory.
DDL_EXPORT char* stand_in_memory(const void* device_pointer);
// Waits as long as a busy device might.
DDL_EXPORT void stand_in_delay();
// Returns the device of the calling thread's context; -1: none.
DDL_EXPORT int stand_in_current_device();

}  // extern "C"
#endif  // KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
