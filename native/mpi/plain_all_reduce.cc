#include "plain_all_reduce.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "common/dtypes.h"

namespace ddl_mpi {
namespace {

// MPI counts are int, and some versions overflow internally when count * size exceeds 2^31, so larger calls are split.
constexpr uint64_t kPieceBytes = uint64_t{1} << 30;
// Elements converted at a time if MPI lacks the type. The staging memory stays in the caches.
constexpr uint64_t kStagedElements = uint64_t{1} << 18;

template <typename T>
MPI_Datatype MpiType() {
  if constexpr (std::is_same_v<T, float>) return MPI_FLOAT;
  if constexpr (std::is_same_v<T, double>) return MPI_DOUBLE;
  if constexpr (std::is_same_v<T, int32_t>) return MPI_INT32_T;
  if constexpr (std::is_same_v<T, int64_t>) return MPI_INT64_T;
  if constexpr (std::is_same_v<T, uint32_t>) return MPI_UINT32_T;
  if constexpr (std::is_same_v<T, uint8_t>) return MPI_UINT8_T;
  if constexpr (std::is_same_v<T, int8_t>) return MPI_INT8_T;
}

// MPI_MIN and MPI_MAX lose NaN in some orders of the ranks; these do not.
template <typename T, bool kMax>
void NanAwareOp(void* in, void* inout, int* length, MPI_Datatype*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  for (int i = 0; i < *length; ++i) {
    if (std::isnan(a[i]) || (kMax ? a[i] > b[i] : a[i] < b[i])) b[i] = std::isnan(b[i]) ? b[i] : a[i];
  }
}

// The MPI operation for one dtype: a predefined one, or one of ours that is freed with this object.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (owned_) MPI_Op_free(&op_);
  }

  template <typename T>
  int Choose(ddl_op op) {
    if constexpr (std::is_floating_point_v<T>) {
      if (op == DDL_MIN || op == DDL_MAX) {
        const int code =
            MPI_Op_create(op == DDL_MAX ? &NanAwareOp<T, true> : &NanAwareOp<T, false>, /*commute=*/1, &op_);
        owned_ = code == MPI_SUCCESS;
        return code;
      }
    }
    switch (op) {
      case DDL_MIN:
        op_ = MPI_MIN;
        break;
      case DDL_MAX:
        op_ = MPI_MAX;
        break;
      case DDL_PRODUCT:
        op_ = MPI_PROD;
        break;
      default:
        op_ = MPI_SUM;
        break;
    }
    return MPI_SUCCESS;
  }

  MPI_Op get() const { return op_; }

 private:
  MPI_Op op_ = MPI_OP_NULL;
  bool owned_ = false;
};

template <typename T>
int Direct(MPI_Comm comm, const void* in, void* out, uint64_t count, ddl_op op, int size) {
  Operation operation;
  int code = operation.Choose<T>(op);
  const T* source = static_cast<const T*>(in);
  T* target = static_cast<T*>(out);
  const uint64_t piece = kPieceBytes / sizeof(T);
  for (uint64_t at = 0; at < count && code == MPI_SUCCESS; at += piece) {
    const int n = static_cast<int>(std::min(piece, count - at));
    code = MPI_Allreduce(in == out ? MPI_IN_PLACE : source + at, target + at, n, MpiType<T>(), operation.get(), comm);
  }
  if (op == DDL_MEAN && code == MPI_SUCCESS) {
    for (uint64_t i = 0; i < count; ++i) target[i] /= static_cast<T>(size);
  }
  return code;
}

template <typename T, typename Wide>
Wide Widen(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Wide>(value);
  } else {
    return value.ToFloat();
  }
}

template <typename T, typename Wide>
T Narrow(Wide value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(value);
  } else {
    return T::FromFloat(value);
  }
}

// Reduces in `Wide`: float for the 16-bit types, int64_t for the means of integers, uint32_t if 8 bits must wrap.
template <typename T, typename Wide>
int Staged(MPI_Comm comm, const void* in, void* out, uint64_t count, ddl_op op, int size) {
  Operation operation;
  int code = operation.Choose<Wide>(op);
  const T* source = static_cast<const T*>(in);
  T* target = static_cast<T*>(out);
  std::unique_ptr<Wide[]> staging(new Wide[static_cast<size_t>(std::min(kStagedElements, count))]);
  for (uint64_t at = 0; at < count && code == MPI_SUCCESS; at += kStagedElements) {
    const uint64_t n = std::min(kStagedElements, count - at);
    for (uint64_t i = 0; i < n; ++i) staging[i] = Widen<T, Wide>(source[at + i]);
    code = MPI_Allreduce(MPI_IN_PLACE, staging.get(), static_cast<int>(n), MpiType<Wide>(), operation.get(), comm);
    for (uint64_t i = 0; i < n; ++i) {
      target[at + i] = Narrow<T, Wide>(op == DDL_MEAN ? staging[i] / static_cast<Wide>(size) : staging[i]);
    }
  }
  if (code != MPI_SUCCESS) static_cast<void>(staging.release());  // parts of it may be under way
  return code;
}

template <typename T>
int ReduceElements(MPI_Comm comm, const void* in, void* out, uint64_t count, ddl_op op, int size) {
  if constexpr (!std::is_arithmetic_v<T>) {
    return Staged<T, float>(comm, in, out, count, op, size);
  } else {
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(int64_t)) {
      if (op == DDL_MEAN) return Staged<T, int64_t>(comm, in, out, count, op, size);
    }
    // Open MPI's vectorised sums of 8-bit integers saturate; ours wrap, as C and NumPy do.
    if constexpr (sizeof(T) == 1) {
      if (op == DDL_SUM || op == DDL_PRODUCT) return Staged<T, uint32_t>(comm, in, out, count, op, size);
    }
    return Direct<T>(comm, in, out, count, op, size);
  }
}

}  // namespace

int PlainAllReduce(MPI_Comm comm, const void* in, void* out, uint64_t count, ddl_dtype dtype, ddl_op op,
                   const char** call) {
  int size = 1;
  *call = "MPI_Comm_size";
  const int code = MPI_Comm_size(comm, &size);
  if (code != MPI_SUCCESS) return code;
  *call = "MPI_Allreduce";
  int reduced = MPI_ERR_TYPE;
  ddl::WithDtype(dtype, [&](auto element, const char*) {
    reduced = ReduceElements<decltype(element)>(comm, in, out, count, op, size);
  });
  return reduced;
}

}  // namespace ddl_mpi
