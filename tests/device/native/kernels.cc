// kernels.cc: kernels of the software GPU. TensorFlow runs all other operations on the CPU and copies tensors.
//
// A kernel only enqueues its work. The kernels use the C++ interface, because the pip package does not export
// TF_AssignUpdateVariable and similar functions, and TensorFlow's DEVICE_DEFAULT kernels of AssignSubVariableOp and
// Transpose compute on the host.
#include "tensorflow/c/kernels.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "software_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/types.h"

// For keras_ddl's collectives, too: KERAS_DDL_TF_STREAM.
extern "C" __attribute__((visibility("default"))) void* keras_ddl_gpu_stream(TF_OpKernelContext* context,
                                                                             int* ordinal) {
  TF_Status* status = TF_NewStatus();
  SP_Stream stream = TF_GetStream(context, status);
  TF_DeleteStatus(status);
  if (stream != nullptr) *ordinal = software_gpu::OrdinalOf(stream);
  return stream;
}

namespace software_gpu {
namespace {

using Eigen::half;
using tensorflow::bfloat16;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using Count = int64_t;

template <class T>
T* Data(const Tensor& tensor) {
  return reinterpret_cast<T*>(MemoryOf(tensor.data()));
}

// Runs `kernel` on the stream of the context's device.
template <class F>
void Enqueue(OpKernelContext* context, F kernel) {
  int ordinal = 0;
  const auto stream =
      static_cast<SP_Stream>(keras_ddl_gpu_stream(reinterpret_cast<TF_OpKernelContext*>(context), &ordinal));
  OP_REQUIRES(context, stream != nullptr, absl::InternalError("the software GPU has no stream here"));
  Launch(stream, std::move(kernel));
}

// Sets element i of an output of this shape to element(i).
template <class T, class F>
void Fill(OpKernelContext* context, const TensorShape& shape, F element) {
  Tensor* output = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, shape, &output));
  T* to = Data<T>(*output);
  const Count count = output->NumElements();
  Enqueue(context, [=] {
    for (Count i = 0; i < count; ++i) to[i] = element(i);
  });
}

#define FUNCTION(Name, arguments, result) \
  struct Name {                           \
    template <class T>                    \
    T operator() arguments const {        \
      using std::sqrt, std::tanh;         \
      return T(result);                   \
    }                                     \
  }
FUNCTION(Add, (T a, T b), a + b);
FUNCTION(Subtract, (T a, T b), a - b);
FUNCTION(Multiply, (T a, T b), (a * b));
FUNCTION(Divide, (T a, T b), a / b);
FUNCTION(Maximum, (T a, T b), a < b ? b : a);
FUNCTION(Minimum, (T a, T b), b < a ? b : a);
FUNCTION(SquaredDifference, (T a, T b), (a - b) * (a - b));
FUNCTION(ReluGrad, (T gradient, T x), x > T(0) ? gradient : T(0));
FUNCTION(TanhGrad, (T y, T gradient), (gradient * (T(1) - y * y)));
FUNCTION(Second, (T, T b), b);
FUNCTION(Sqrt, (T a), sqrt(a));
FUNCTION(Rsqrt, (T a), T(1) / sqrt(a));
FUNCTION(Square, (T a), (a * a));
FUNCTION(Negative, (T a), -a);
FUNCTION(Reciprocal, (T a), T(1) / a);
FUNCTION(Relu, (T a), a > T(0) ? a : T(0));
FUNCTION(Tanh, (T a), tanh(a));
#undef FUNCTION

template <class T, class F>
struct Unary : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const T* a = Data<T>(context->input(0));
    Fill<T>(context, context->input(0).shape(), [=](Count i) { return F()(a[i]); });
  }
};

template <class From, class To>
struct Cast : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const From* a = Data<From>(context->input(0));
    Fill<To>(context, context->input(0).shape(), [=](Count i) { return static_cast<To>(a[i]); });
  }
};

// Returns, for each of `dims` axes, the distance in memory between neighbours; 0 where one element is repeated.
std::vector<Count> Strides(const TensorShape& shape, size_t dims) {
  std::vector<Count> strides(dims, 0);
  Count inner = 1;
  for (int d = shape.dims(); d-- > 0; inner *= shape.dim_size(d)) {
    if (shape.dim_size(d) != 1) strides[dims - static_cast<size_t>(shape.dims() - d)] = inner;
  }
  return strides;
}

// Returns the position of element i of a tensor with these sizes in memory with these strides.
Count Place(Count i, const std::vector<Count>& sizes, const std::vector<Count>& strides) {
  Count place = 0;
  for (size_t d = sizes.size(); d-- > 0; i /= sizes[d]) place += i % sizes[d] * strides[d];
  return place;
}

template <class T, class F>
struct Binary : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const TensorShape &a = context->input(0).shape(), &b = context->input(1).shape();
    std::vector<Count> sizes(static_cast<size_t>(std::max(a.dims(), b.dims())), 1);
    for (const TensorShape* each : {&a, &b}) {
      for (int d = 0; d < each->dims(); ++d) {
        Count& size = sizes[sizes.size() - static_cast<size_t>(each->dims() - d)];
        if (each->dim_size(d) == 1) continue;
        OP_REQUIRES(context, size == 1 || size == each->dim_size(d), absl::InvalidArgumentError("Incompatible shapes"));
        size = each->dim_size(d);
      }
    }
    const std::vector<Count> in_a = Strides(a, sizes.size()), in_b = Strides(b, sizes.size());
    const T *x = Data<T>(context->input(0)), *y = Data<T>(context->input(1));
    Fill<T>(context, TensorShape(sizes),
            [=](Count i) { return F()(x[Place(i, sizes, in_a)], y[Place(i, sizes, in_b)]); });
  }
};

template <class T>
struct AddN : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    std::vector<const T*> from;
    for (int i = 0; i < context->num_inputs(); ++i) from.push_back(Data<T>(context->input(i)));
    Fill<T>(context, context->input(0).shape(), [=](Count i) {
      T sum(0);
      for (const T* each : from) sum += each[i];
      return sum;
    });
  }
};

template <class T>
struct MatMul : OpKernel {
  explicit MatMul(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("transpose_a", &transpose_a_));
    OP_REQUIRES_OK(construction, construction->GetAttr("transpose_b", &transpose_b_));
  }
  void Compute(OpKernelContext* context) override {
    const Tensor &a = context->input(0), &b = context->input(1);
    const Count rows = a.dim_size(transpose_a_ ? 1 : 0), columns = b.dim_size(transpose_b_ ? 0 : 1);
    const Count inner = a.dim_size(transpose_a_ ? 0 : 1);
    OP_REQUIRES(context, inner == b.dim_size(transpose_b_ ? 1 : 0), absl::InvalidArgumentError("Matrix size"));
    const std::pair<Count, Count> in_a = transpose_a_ ? std::pair(Count{1}, rows) : std::pair(inner, Count{1});
    const std::pair<Count, Count> in_b = transpose_b_ ? std::pair(Count{1}, inner) : std::pair(columns, Count{1});
    const T *x = Data<T>(a), *y = Data<T>(b);
    Fill<T>(context, TensorShape({rows, columns}), [=](Count i) {
      std::conditional_t<sizeof(T) == 8, double, float> sum = 0;
      const T* of_x = x + i / columns * in_a.first;
      const T* of_y = y + i % columns * in_b.second;
      for (Count k = 0; k < inner; ++k) {
        sum += static_cast<decltype(sum)>(of_x[k * in_a.second]) * static_cast<decltype(sum)>(of_y[k * in_b.first]);
      }
      return static_cast<T>(sum);
    });
  }

 private:
  bool transpose_a_ = false, transpose_b_ = false;
};

// BiasAdd and its gradient. Grappler rewrites layers to channels first for devices of type "GPU".
template <class T, bool kIsGradient>
struct Bias : OpKernel {
  explicit Bias(OpKernelConstruction* construction) : OpKernel(construction) {
    std::string format;
    OP_REQUIRES_OK(construction, construction->GetAttr("data_format", &format));
    channels_first_ = format == "NCHW";
  }
  void Compute(OpKernelContext* context) override {
    const Tensor& a = context->input(0);
    const int axis = channels_first_ ? 1 : a.dims() - 1;
    const Count channels = a.dim_size(axis), count = a.NumElements();
    Count inner = 1;
    for (int d = axis + 1; d < a.dims(); ++d) inner *= a.dim_size(d);
    const T* from = Data<T>(a);
    if constexpr (kIsGradient) {
      Fill<T>(context, TensorShape({channels}), [=](Count channel) {
        std::conditional_t<sizeof(T) == 8, double, float> sum = 0;
        for (Count start = channel * inner; start < count; start += channels * inner) {
          for (Count i = start; i < start + inner; ++i) sum += static_cast<decltype(sum)>(from[i]);
        }
        return static_cast<T>(sum);
      });
    } else {
      const T* bias = Data<T>(context->input(1));
      Fill<T>(context, a.shape(), [=](Count i) { return from[i] + bias[i / inner % channels]; });
    }
  }

 private:
  bool channels_first_ = false;
};

template <class T>
struct Transpose : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const Tensor &a = context->input(0), &order = context->input(1);  // `order` is in host memory
    const std::vector<Count> before = Strides(a.shape(), static_cast<size_t>(a.dims()));
    std::vector<Count> sizes, strides;
    for (Count d = 0; d < order.NumElements(); ++d) {
      const int old = order.flat<int32_t>()(d);
      sizes.push_back(a.dim_size(old));
      strides.push_back(before[static_cast<size_t>(old)]);
    }
    const T* from = Data<T>(a);
    Fill<T>(context, TensorShape(sizes), [=](Count i) { return from[Place(i, sizes, strides)]; });
  }
};

// A kernel on the variable in its first input, which stays locked. Writers get memory that no reader shares.
struct OnVariable : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(context, LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    Run(context, variable->tensor());
  }
  virtual void Run(OpKernelContext* context, Tensor* value) = 0;

  static absl::Status MakeOwn(OpKernelContext* context, Tensor* value) {
    if (value->RefCountIsOne()) return absl::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(value->dtype(), value->shape(), &copy));
    *value = copy;
    return absl::OkStatus();
  }
};

template <class T, class F>
struct Update : OnVariable {
  using OnVariable::OnVariable;
  void Run(OpKernelContext* context, Tensor* value) override {
    OP_REQUIRES(context, value->shape() == context->input(1).shape(), absl::InvalidArgumentError("shapes differ"));
    const T *before = Data<T>(*value), *change = Data<T>(context->input(1));
    OP_REQUIRES_OK(context, MakeOwn(context, value));
    T* after = Data<T>(*value);
    const Count count = value->NumElements();
    Enqueue(context, [=] {
      for (Count i = 0; i < count; ++i) after[i] = F()(before[i], change[i]);
    });
  }
};

template <class T>
struct GradientDescent : OnVariable {
  using OnVariable::OnVariable;
  void Run(OpKernelContext* context, Tensor* value) override {
    const T *before = Data<T>(*value), *rate = Data<T>(context->input(1)), *gradient = Data<T>(context->input(2));
    OP_REQUIRES_OK(context, MakeOwn(context, value));
    T* after = Data<T>(*value);
    const Count count = value->NumElements();
    Enqueue(context, [=] {
      for (Count i = 0; i < count; ++i) after[i] = before[i] - *rate * gradient[i];
    });
  }
};

template <class T, class Index>
struct Gather : OnVariable {
  using OnVariable::OnVariable;
  void Run(OpKernelContext* context, Tensor* value) override {
    TensorShape shape = context->input(1).shape();
    Count width = 1;
    for (int d = 1; d < value->dims(); ++d) shape.AddDim(value->dim_size(d)), width *= value->dim_size(d);
    const T* from = Data<T>(*value);
    const Index* rows = Data<Index>(context->input(1));
    Fill<T>(context, shape, [=](Count i) { return from[static_cast<Count>(rows[i / width]) * width + i % width]; });
  }
};

template <class T, class Index, class F>
struct Scatter : OnVariable {
  using OnVariable::OnVariable;
  void Run(OpKernelContext* context, Tensor* value) override {
    const Tensor &rows = context->input(1), &updates = context->input(2);
    const T *before = Data<T>(*value), *from = Data<T>(updates);
    OP_REQUIRES_OK(context, MakeOwn(context, value));
    T* after = Data<T>(*value);
    const Count all = value->NumElements(), width = all / value->dim_size(0), count = rows.NumElements() * width;
    const bool is_scalar = updates.dims() == 0;
    const Index* index = Data<Index>(rows);
    Enqueue(context, [=] {
      if (after != before) std::copy_n(before, all, after);
      for (Count i = 0; i < count; ++i) {
        T* at = after + index[i / width] * width + i % width;
        *at = F()(*at, from[is_scalar ? 0 : i]);
      }
    });
  }
};

using Definition = tensorflow::KernelDefBuilder;

template <class Kernel>
void Register(Definition& definition) {
  using Registrar = tensorflow::kernel_factory::OpKernelRegistrar;
  Registrar(definition.Device("GPU").Build(), "software GPU",
            [](OpKernelConstruction* construction) -> OpKernel* { return new Kernel(construction); });
}

template <class T, class Index>
void RegisterRows() {
  const auto define = [](Definition&& of_op) -> Definition& {
    return of_op.HostMemory("resource").TypeConstraint<T>("dtype").template TypeConstraint<Index>("Tindices");
  };
  Register<Gather<T, Index>>(define(Definition("ResourceGather")));
  Register<Scatter<T, Index, Add>>(define(Definition("ResourceScatterAdd")));
  Register<Scatter<T, Index, Subtract>>(define(Definition("ResourceScatterSub")));
  Register<Scatter<T, Index, Second>>(define(Definition("ResourceScatterUpdate")));
}

template <class T>
void RegisterUpdates() {
  const auto define = [](Definition&& of_op) -> Definition& {
    return of_op.HostMemory("resource").TypeConstraint<T>("dtype");
  };
  Register<Update<T, Add>>(define(Definition("AssignAddVariableOp")));
  Register<Update<T, Subtract>>(define(Definition("AssignSubVariableOp")));
}

template <class From, class... To>
void RegisterCasts() {
  (Register<Cast<From, To>>(Definition("Cast").TypeConstraint<From>("SrcT").template TypeConstraint<To>("DstT")), ...);
}

template <class T>
void RegisterAll() {
  const auto define = [](Definition&& of_op) -> Definition& { return of_op.TypeConstraint<T>("T"); };
  Register<Binary<T, Add>>(define(Definition("AddV2")));
  Register<Binary<T, Add>>(define(Definition("Add")));  // Grappler creates it for longer sums
  Register<Binary<T, Subtract>>(define(Definition("Sub")));
  Register<Binary<T, Multiply>>(define(Definition("Mul")));
  Register<Binary<T, Divide>>(define(Definition("RealDiv")));
  Register<Binary<T, Maximum>>(define(Definition("Maximum")));
  Register<Binary<T, Minimum>>(define(Definition("Minimum")));
  Register<Binary<T, SquaredDifference>>(define(Definition("SquaredDifference")));
  Register<Binary<T, ReluGrad>>(define(Definition("ReluGrad")));
  Register<Binary<T, TanhGrad>>(define(Definition("TanhGrad")));
  Register<Unary<T, Sqrt>>(define(Definition("Sqrt")));
  Register<Unary<T, Rsqrt>>(define(Definition("Rsqrt")));
  Register<Unary<T, Square>>(define(Definition("Square")));
  Register<Unary<T, Negative>>(define(Definition("Neg")));
  Register<Unary<T, Reciprocal>>(define(Definition("Reciprocal")));  // Grappler creates it for 1 / x
  Register<Unary<T, Relu>>(define(Definition("Relu")));
  Register<Unary<T, Tanh>>(define(Definition("Tanh")));
  Register<AddN<T>>(define(Definition("AddN")));
  Register<MatMul<T>>(define(Definition("MatMul")));
  Register<Bias<T, false>>(define(Definition("BiasAdd")));
  Register<Bias<T, true>>(define(Definition("BiasAddGrad")));
  Register<Transpose<T>>(define(Definition("Transpose")).template TypeConstraint<int32_t>("Tperm").HostMemory("perm"));
  Register<GradientDescent<T>>(define(Definition("ResourceApplyGradientDescent")).HostMemory("var"));
  RegisterUpdates<T>();
  RegisterRows<T, int32_t>();
  RegisterRows<T, int64_t>();
  RegisterCasts<T, float, double, half, bfloat16>();
}

}  // namespace
}  // namespace software_gpu

// TensorFlow calls this function when it loads the library.
extern "C" __attribute__((visibility("default"))) void TF_InitKernel() {
  software_gpu::RegisterAll<float>();
  software_gpu::RegisterAll<double>();
  software_gpu::RegisterAll<Eigen::half>();
  software_gpu::RegisterAll<tensorflow::bfloat16>();
  software_gpu::RegisterUpdates<int64_t>();
}
