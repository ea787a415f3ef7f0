#include "functions.h"

#include <dlfcn.h>

namespace ddl_cuda {
namespace {

// Returns a library by its name: the one that this process has already loaded, such as PyTorch's, or the system's.
struct Library {
  explicit Library(const char* name) : handle(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) error = dlerror();
  }
  template <typename Function>
  void Find(const char* symbol, Function* function) {
    if (!error.empty()) return;
    *function = reinterpret_cast<Function>(dlsym(handle, symbol));
    if (*function == nullptr) error = std::string(symbol) + " is missing: the library is too old";
  }
  void* const handle;
  std::string error;
};

struct LoadedCuda : Library {
  LoadedCuda() : Library("libcuda.so.1") {
#define DDL_FIND(name, symbol, ...) Find(#symbol, &functions.name);
    DDL_CUDA_FUNCTIONS(DDL_FIND)
#undef DDL_FIND
  }
  CudaFunctions functions;
};

struct LoadedNccl : Library {
  LoadedNccl() : Library("libnccl.so.2") {
#define DDL_FIND(result, name, symbol, ...) Find(#symbol, &functions.name);
    DDL_NCCL_FUNCTIONS(DDL_FIND)
#undef DDL_FIND
  }
  NcclFunctions functions;
};

}  // namespace

const CudaFunctions* Cuda(std::string* error) {
  static const auto* const loaded = new LoadedCuda;
  *error = loaded->error;
  return error->empty() ? &loaded->functions : nullptr;
}

const NcclFunctions* Nccl(std::string* error) {
  static const auto* const loaded = new LoadedNccl;
  *error = loaded->error;
  return error->empty() ? &loaded->functions : nullptr;
}

}  // namespace ddl_cuda
