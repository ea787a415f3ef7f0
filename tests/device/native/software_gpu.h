// software_gpu.h: functions of the software GPU for its kernels. See device.cc.
#ifndef SOFTWARE_GPU_H_
#define SOFTWARE_GPU_H_

#include <functional>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

namespace software_gpu {

// Returns the memory behind a device pointer. Only code that runs on a stream may access it.
char* MemoryOf(const void* pointer);

// Runs `kernel` on the stream's thread after all work enqueued before, and returns at once. Any thread may call.
void Launch(SP_Stream stream, std::function<void()> kernel);

// Returns the number of the stream's device.
int OrdinalOf(SP_Stream stream);

}  // namespace software_gpu

#endif
