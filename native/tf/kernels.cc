#include "kernels.h"

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "attributes.h"
#include "collective_call.h"
#include "common/wait.h"

namespace keras_ddl::tf {
namespace {

template <ddl_kind kind, bool on_gpu>
void* Create(TF_OpKernelConstruction* construction) {
  auto attributes = std::make_unique<Attributes>();
  attributes->on_gpu = on_gpu;
  // After a failure TensorFlow frees the kernel without running it.
  ReadAttributes(construction, kind, attributes.get());
  return attributes.release();
}

void ComputeAsync(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  // `done` is the address of a std::function<void()> parameter of TensorFlow's AsyncOpKernel::ComputeAsync, which dies
  // when this function returns: TF_RunAsyncOpKernelDoneCallback(done) on another thread would crash. The copy stays
  // valid. The C API does not promise this, so only TensorFlow versions on which it was tested get ComputeAsync
  // (compat/tensorflow.py); others get ComputeSync.
  std::function<void()> finish = *reinterpret_cast<const std::function<void()>*>(done);
  StartCollective(*static_cast<const Attributes*>(kernel), context, std::move(finish));
}

void ComputeSync(void* kernel, TF_OpKernelContext* context) {
  struct Latch {
    std::mutex mutex;
    std::condition_variable changed;
    bool finished = false;
  } latch;
  StartCollective(*static_cast<const Attributes*>(kernel), context, [&latch] {
    // Notify under the lock: the waiter owns the latch, and frees it as soon as it has the lock.
    std::lock_guard<std::mutex> lock(latch.mutex);
    latch.finished = true;
    latch.changed.notify_one();
  });
  std::unique_lock<std::mutex> lock(latch.mutex);
  ddl::Wait(latch.changed, lock, [&latch] { return latch.finished; });
}

void Destroy(void* kernel) { delete static_cast<Attributes*>(kernel); }

template <ddl_kind kind>
KernelFunctions Collective() {
  return {&Create<kind, false>, &Create<kind, true>, &ComputeAsync, &ComputeSync, &Destroy};
}

}  // namespace

KernelFunctions AllReduceKernel() { return Collective<DDL_ALL_REDUCE>(); }
KernelFunctions BroadcastKernel() { return Collective<DDL_BROADCAST>(); }
KernelFunctions ReduceScatterKernel() { return Collective<DDL_REDUCE_SCATTER>(); }
KernelFunctions AllGatherKernel() { return Collective<DDL_ALL_GATHER>(); }
KernelFunctions AllToAllKernel() { return Collective<DDL_ALL_TO_ALL>(); }

}  // namespace keras_ddl::tf
