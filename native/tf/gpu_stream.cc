// The function of gpu_stream.h. Built on the user's machine, for one version of TensorFlow.
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

// context: a TF_OpKernelContext of the C API, which is an OpKernelContext.
extern "C" __attribute__((visibility("default"))) void* keras_ddl_gpu_stream(tensorflow::OpKernelContext* context,
                                                                             int* ordinal) {
  stream_executor::Stream* const stream = context->op_device_context()->stream();
  *ordinal = stream->parent()->device_ordinal();
  return stream->platform_specific_handle().stream;
}
