// registration.cc: the ops, as TensorFlow sees them when it loads this library.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "ddl.h"
#include "gpu_stream.h"
#include "kernels.h"
#include "shape_functions.h"
#include "tf_c_api.h"
#include "tf_handles.h"

namespace keras_ddl::tf {
namespace {

struct OpSpec {
  const char* name;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  std::vector<const char*> attrs;
  void (*shape_function)(TF_ShapeInferenceContext*, TF_Status*);
  KernelFunctions kernel;
};

// Attributes of several ops. `tensor_name` is the key by which ranks find each other's requests ('' is the node's
// name); `detail` is shown when ranks disagree; `fingerprint` is anything that ranks must agree on; `blocking` says
// that the program's main thread waits for this op alone; `communicator` is a number that ddl_find knows (0: all
// ranks).
#define DDL_COMMON_ATTRS                                                                                              \
  "T: {half, bfloat16, float, double, int32, int64, uint8, int8}", "tensor_name: string = ''", "detail: string = ''", \
      "fingerprint: int = 0", "blocking: bool = false", "communicator: int = 0"
#define DDL_REDUCTION_ATTR "reduction: string = 'sum'"
// `mpi`: by MPI_Allreduce, as a baseline. `check`: >= 0 compares with MPI_Allreduce within that tolerance.
#define DDL_BASELINE_ATTRS "mpi: bool = false", "check: float = -1.0"
// `compression`: '', 'bfloat16' or 'float16'. `feedback`: see ddl_request.
#define DDL_COMPRESSION_ATTRS "compression: string = ''", "feedback: string = ''"
// Its place in a plan (ddl.h), 0 of 0 for none: set in the graph when the whole plan is known.
#define DDL_PLAN_ATTRS "plan: int = 0", "plan_index: int = 0", "plan_size: int = 0"
// Fails while some rank has joined: the rows of every rank are needed.
#define DDL_ALL_RANKS_ATTR "all_ranks: bool = false"

std::vector<OpSpec> Ops() {
  return {
      {"DdlBroadcast",
       {"input: N * T"},
       {"output: N * T"},
       {"N: int >= 1", DDL_COMMON_ATTRS, "root: int = 0"},
       &SameShapes,
       BroadcastKernel()},
      {"DdlAllReduce",
       {"input: T"},
       {"output: T"},
       {DDL_COMMON_ATTRS, DDL_REDUCTION_ATTR, DDL_BASELINE_ATTRS, DDL_COMPRESSION_ATTRS, DDL_PLAN_ATTRS},
       &SameShapes,
       AllReduceKernel()},
      {"DdlAllReduceN",
       {"input: N * T"},
       {"output: N * T"},
       {"N: int >= 1", DDL_COMMON_ATTRS, DDL_REDUCTION_ATTR, DDL_BASELINE_ATTRS, DDL_COMPRESSION_ATTRS, DDL_PLAN_ATTRS},
       &SameShapes,
       AllReduceKernel()},
      {"DdlReduceScatter",
       {"input: T"},
       {"output: T"},
       {DDL_COMMON_ATTRS, DDL_REDUCTION_ATTR},
       &ReduceScatterShape,
       ReduceScatterKernel()},
      {"DdlAllGather",
       {"input: T"},
       {"output: T", "rows: int64"},
       {DDL_COMMON_ATTRS, DDL_ALL_RANKS_ATTR, DDL_PLAN_ATTRS},
       &AllGatherShape,
       AllGatherKernel()},
      {"DdlAllToAll",
       {"input: T", "splits: int64"},
       {"output: T", "received: int64"},
       {DDL_COMMON_ATTRS, DDL_PLAN_ATTRS},
       &AllToAllShape,
       AllToAllKernel()},
  };
}

// "input: N * T" -> "input"
std::string ArgumentName(std::string_view spec) { return std::string(spec.substr(0, spec.find(':'))); }

void Report(const char* what, const OpSpec& op, const Status& status) {
  // A static constructor cannot fail; compat/tensorflow.py finds the op missing and raises.
  if (!status.ok()) std::fprintf(stderr, "keras_ddl: %s of %s failed: %s\n", what, op.name, TF_Message(status.get()));
}

void RegisterOp(const OpSpec& op) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(op.name);
  for (const char* spec : op.inputs) TF_OpDefinitionBuilderAddInput(builder, spec);
  for (const char* spec : op.outputs) TF_OpDefinitionBuilderAddOutput(builder, spec);
  for (const char* spec : op.attrs) TF_OpDefinitionBuilderAddAttr(builder, spec);
  // Stateful: never folded into a constant, merged with an equal op, or left out on one rank only.
  TF_OpDefinitionBuilderSetIsStateful(builder, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, op.shape_function);
  Status status;
  TF_RegisterOpDefinition(builder, status.get());
  Report("definition", op, status);
}

// Where the tensors of a kernel are, those of dtype `T` and the others: `splits`, `rows` and `received`.
enum class Memory { kCpu, kAllInHostMemory, kOnGpu };

// dtype: the only `T` of the kernel; 0: every `T`.
void RegisterKernel(const OpSpec& op, Memory memory, bool async, TF_DataType dtype = TF_DataType{}) {
  const char* const device = memory == Memory::kCpu ? "CPU" : "GPU";
  const auto create = memory == Memory::kOnGpu ? op.kernel.create_on_gpu : op.kernel.create;
  TF_KernelBuilder* builder =
      async ? TF_NewAsyncKernelBuilder(op.name, device, create, op.kernel.compute_async, op.kernel.destroy)
            : TF_NewKernelBuilder(op.name, device, create, op.kernel.compute_sync, op.kernel.destroy);
  Status status;
  if (dtype != TF_DataType{}) TF_KernelBuilder_TypeConstraint(builder, "T", dtype, status.get());
  for (const auto& specs : {op.inputs, op.outputs}) {
    for (const std::string_view spec : specs) {
      const bool on_gpu = memory == Memory::kOnGpu && spec.back() == 'T';
      if (memory != Memory::kCpu && !on_gpu) TF_KernelBuilder_HostMemory(builder, ArgumentName(spec).c_str());
    }
  }
  if (status.ok()) TF_RegisterKernelBuilder(op.name, builder, status.get());
  Report(device, op, status);
}

void RegisterKernels(const OpSpec& op, bool async) {
  RegisterKernel(op, Memory::kCpu, async);
  if (keras_ddl_gpu_stream == nullptr) {
    RegisterKernel(op, Memory::kAllInHostMemory, async);  // TensorFlow makes the copies
    return;
  }
  for (const TF_DataType dtype : {TF_HALF, TF_BFLOAT16, TF_FLOAT, TF_DOUBLE}) {
    RegisterKernel(op, Memory::kOnGpu, async, dtype);
  }
  // Integers are mostly sizes, indices and bytes that the host makes and reads.
  for (const TF_DataType dtype : {TF_INT32, TF_INT64, TF_UINT8, TF_INT8}) {
    RegisterKernel(op, Memory::kAllInHostMemory, async, dtype);
  }
}

__attribute__((constructor)) void RegisterAll() {
  if (ddl_abi_version() != DDL_ABI_VERSION) {
    std::fprintf(stderr, "keras_ddl: libkeras_ddl.so has ABI %u, libkeras_ddl_tf.so was built for %u. Reinstall.\n",
                 ddl_abi_version(), DDL_ABI_VERSION);
    return;
  }
  // Set by compat/tensorflow.py, which knows the version of TensorFlow. Without it: the kernels that every version
  // runs.
  const char* kernels = std::getenv("KERAS_DDL_TF_KERNELS");
  const bool async = kernels != nullptr && std::string_view(kernels) == "async";
  for (const OpSpec& op : Ops()) {
    RegisterOp(op);
    RegisterKernels(op, async);
  }
}

}  // namespace
}  // namespace keras_ddl::tf
