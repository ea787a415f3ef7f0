#include "kernels.h"

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "attributes.h"
#include "collective_call.h"
#include "init_call.h"

namespace keras_ddl::tf {
namespace {

void Start(const Attributes& attributes, TF_OpKernelContext* context, std::function<void()> finish) {
  StartCollective(attributes, context, std::move(finish));
}
void Start(const InitAttributes& attributes, TF_OpKernelContext* context, std::function<void()> finish) {
  StartInit(attributes, context, std::move(finish));
}

template <ddl_kind kind>
void* CreateCollective(TF_OpKernelConstruction* construction) {
  auto attributes = std::make_unique<Attributes>();
  // After a failure TensorFlow frees the kernel without running it.
  ReadAttributes(construction, kind, attributes.get());
  return attributes.release();
}

void* CreateInit(TF_OpKernelConstruction* construction) {
  auto attributes = std::make_unique<InitAttributes>();
  ReadInitAttributes(construction, attributes.get());
  return attributes.release();
}

template <typename KernelAttributes>
void ComputeAsync(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  // `done` is the address of a std::function<void()> parameter of TensorFlow's AsyncOpKernel::ComputeAsync, which dies
  // when this function returns: TF_RunAsyncOpKernelDoneCallback(done) on another thread would crash. The copy lives
  // on. This is the one thing here that the C API does not promise, so it is used with TensorFlow versions on which
  // it was tested only (compat/tensorflow.py); others get ComputeSync.
  std::function<void()> finish = *reinterpret_cast<const std::function<void()>*>(done);
  Start(*static_cast<const KernelAttributes*>(kernel), context, std::move(finish));
}

template <typename KernelAttributes>
void ComputeSync(void* kernel, TF_OpKernelContext* context) {
  struct Latch {
    std::mutex mutex;
    std::condition_variable changed;
    bool finished = false;
  } latch;
  Start(*static_cast<const KernelAttributes*>(kernel), context, [&latch] {
    // Notified under the lock: the waiter owns the latch and frees it as soon as it may.
    std::lock_guard<std::mutex> lock(latch.mutex);
    latch.finished = true;
    latch.changed.notify_one();
  });
  std::unique_lock<std::mutex> lock(latch.mutex);
  latch.changed.wait(lock, [&latch] { return latch.finished; });
}

template <typename KernelAttributes>
void Destroy(void* kernel) {
  delete static_cast<KernelAttributes*>(kernel);
}

template <ddl_kind kind>
KernelFunctions Collective() {
  return {&CreateCollective<kind>, &ComputeAsync<Attributes>, &ComputeSync<Attributes>, &Destroy<Attributes>};
}

}  // namespace

KernelFunctions AllReduceKernel() { return Collective<DDL_ALL_REDUCE>(); }
KernelFunctions BroadcastKernel() { return Collective<DDL_BROADCAST>(); }
KernelFunctions ReduceScatterKernel() { return Collective<DDL_REDUCE_SCATTER>(); }
KernelFunctions AllGatherKernel() { return Collective<DDL_ALL_GATHER>(); }
KernelFunctions InitKernel() {
  return {&CreateInit, &ComputeAsync<InitAttributes>, &ComputeSync<InitAttributes>, &Destroy<InitAttributes>};
}

}  // namespace keras_ddl::tf
