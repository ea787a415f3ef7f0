// software_gpu.h: what kernels of the software GPU need of it. See device.cc.
#ifndef SOFTWARE_GPU_H_
#define SOFTWARE_GPU_H_

#include <functional>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

namespace software_gpu {

// Returns where the memory behind a device pointer lies. To be read and written by what runs on a stream alone.
char* MemoryOf(const void* pointer);

// Runs `kernel` on the stream's thread, after all that was enqueued before. Returns at once; any thread may call.
void Launch(SP_Stream stream, std::function<void()> kernel);

}  // namespace software_gpu

#endif
