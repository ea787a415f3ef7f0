// Controls for the stand-ins for libcuda and libnccl. They are mocks, without a GPU, a driver or NCCL. They reproduce
// three properties: the host cannot read device memory, streams run late on their own threads, and NCCL
// works in the background. The real libraries do not have these functions.
#ifndef KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
#define KERAS_DDL_TESTS_DEVICE_STAND_IN_H_

#include <cstdint>

#include "ddl.h"

extern "C" {

// Makes `function` fail from the `after`th next call on (0: the next), `times` times (-1: always). It is a name of
// libcuda or libnccl, or "ncclAsync": the state that ncclCommGetAsyncError reports.
DDL_EXPORT void stand_in_fail(const char* function, int after, int times);
// Cancels all requested failures.
DDL_EXPORT void stand_in_heal();
// For the other stand-in: whether `function` must fail now.
DDL_EXPORT bool stand_in_fails(const char* function);
// Returns the number of live "contexts", "streams", "events", "allocations", "registered", or of all "pageable"
// copies and "waits" of streams for events so far.
DDL_EXPORT int64_t stand_in_count(const char* what);
// Stops all copies to or from devices, as behind a kernel that does not end, until it is called with false.
DDL_EXPORT void stand_in_stall(bool stalled);

// Runs `task(data)` on a stream, after its earlier tasks; `stream` as in cuda.h.
DDL_EXPORT void stand_in_enqueue(void* stream, void (*task)(void*), void* data);
// Returns the host address behind device memory.
DDL_EXPORT void* stand_in_memory(const void* device_pointer);
// Waits as long as a busy device might.
DDL_EXPORT void stand_in_delay();
// Returns the device of the calling thread's context; -1: none.
DDL_EXPORT int stand_in_current_device();

}  // extern "C"
#endif  // KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
