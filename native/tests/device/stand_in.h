// What tests ask of the stand-ins for libcuda and libnccl. They are mocks: no GPU, no driver and no NCCL is behind
// them. What they do faithfully: the host cannot read device memory; streams run on threads of their own, late; NCCL
// works in the background. With the real libraries these functions are not found.
#ifndef KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
#define KERAS_DDL_TESTS_DEVICE_STAND_IN_H_

#include <cstdint>

#include "ddl.h"

extern "C" {

// From the `after`th next call on (0: the next), `function` fails, `times` times (-1: always). The name is that of
// libcuda or libnccl, or "ncclAsync": the state that ncclCommGetAsyncError tells of.
DDL_EXPORT void stand_in_fail(const char* function, int after, int times);
// Forgets all of these.
DDL_EXPORT void stand_in_heal();
// For the other stand-in: whether `function` is to fail now.
DDL_EXPORT bool stand_in_fails(const char* function);
// How many are alive of: "contexts", "streams", "events", "allocations", "registered"; or were made of: "pageable"
// copies, "waits" of streams for events.
DDL_EXPORT int64_t stand_in_count(const char* what);
// Stops all copies to or from devices, as behind a kernel that does not end, until it is called with false.
DDL_EXPORT void stand_in_stall(bool stalled);

// Runs `task(data)` on a stream, after what it has; `stream` as cuda.h's. Where the host finds memory of a device.
DDL_EXPORT void stand_in_enqueue(void* stream, void (*task)(void*), void* data);
DDL_EXPORT void* stand_in_memory(const void* device_pointer);
// A delay such as a busy device has.
DDL_EXPORT void stand_in_dawdle();
// The device of the calling thread's context; -1: none.
DDL_EXPORT int stand_in_current_device();

}  // extern "C"
#endif  // KERAS_DDL_TESTS_DEVICE_STAND_IN_H_
