#include "collective_call.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/dtypes.h"
#include "common/hash.h"
#include "ddl.h"
#include "gpu_stream.h"
#include "tf_handles.h"

namespace keras_ddl::tf {
namespace {

// The core shows 1023 bytes of a detail.
constexpr size_t kDetailBytes = 1023;

// The bytes up to which a TensorFlow thread runs a collective itself, and how long it waits for the other ranks.
constexpr uint64_t kInlineBytes = 64 * 1024;
constexpr uint32_t kInlinePatienceUs = 1000;

// The data pointer of tensors without elements, for which TensorFlow may give nullptr.
char empty_buffer[1];

void* Data(const TF_Tensor* tensor) {
  void* data = TF_TensorByteSize(tensor) == 0 ? nullptr : TF_TensorData(tensor);
  return data == nullptr ? empty_buffer : data;
}

struct Shape {
  std::vector<int64_t> dims;

  explicit Shape(const TF_Tensor* tensor) : dims(static_cast<size_t>(TF_NumDims(tensor))) {
    for (size_t d = 0; d < dims.size(); ++d) dims[d] = TF_Dim(tensor, static_cast<int>(d));
  }
  int rank() const { return static_cast<int>(dims.size()); }
  // A scalar counts as one row of one element.
  int64_t rows() const { return dims.empty() ? 1 : dims[0]; }
  int64_t row_count() const {
    int64_t count = 1;
    for (size_t d = 1; d < dims.size(); ++d) count *= dims[d];
    return count;
  }
  int64_t count() const { return rows() * row_count(); }
};

class Call {
 public:
  Call(const Attributes& attributes, TF_OpKernelContext* context, std::function<void()> finish)
      : attributes_(attributes), context_(context), finish_(std::move(finish)) {}

  // Takes inputs and outputs from the context and fills `request`; `buffers` backs it. False: `status` says why not.
  bool Prepare(ddl_comm* comm, ddl_request* request, Status* status);

  void Finish(const ddl_failure* failure) {
    // References are dropped first: `finish_` may end the step, and with it the context and its allocators.
    inputs_.clear();
    outputs_.clear();
    if (failure != nullptr) {
      Status status;
      status.Set(*failure, attributes_.communicator);
      TF_OpKernelContext_Failure(context_, status.get());
    }
    finish_();
  }

  // all_gather, all_to_all: allocates the output of the rows, and the output with the number of rows from each rank.
  void* Allocate(const uint64_t* rows_by_rank, int size);

 private:
  bool TakeInput(int index, Status* status) {
    TF_Tensor* input = nullptr;
    TF_GetInput(context_, index, &input, status->get());
    if (!status->ok()) return false;
    inputs_[static_cast<size_t>(index)].reset(input);
    return true;
  }
  // For a tensor whose number of rows may differ between ranks.
  bool HasFreeRows() const { return attributes_.kind == DDL_ALL_GATHER || attributes_.kind == DDL_ALL_TO_ALL; }
  bool AllocateLikeInput(int index, const Shape& shape, Status* status);
  bool AllocateChunk(ddl_comm* comm, const Shape& shape, Status* status);
  bool TakeSplits(ddl_comm* comm, ddl_request* request, Status* status);
  bool TakeStream(ddl_request* request, Status* status);
  void Describe(int index, const Shape& shape);

  const Attributes& attributes_;
  TF_OpKernelContext* context_;
  std::function<void()> finish_;
  std::vector<TensorPtr> inputs_;
  std::vector<TensorPtr> outputs_;
  std::vector<ddl_buffer> buffers_;
  ddl_location location_{};  // of the buffers
  std::vector<int64_t> gathered_dims_;
  std::string name_;
  std::string detail_;
  uint64_t fingerprint_ = ddl::kHashOfNothing;
};

bool Call::AllocateLikeInput(int index, const Shape& shape, Status* status) {
  const size_t i = static_cast<size_t>(index);
  // TensorFlow hands the input's memory over only when nobody else holds it, not even this call.
  inputs_[i].reset();
  int forwarded = -1;
  TF_Tensor* output = TF_ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.dims.data(), shape.rank(),
                                                      &forwarded, status->get());
  if (!status->ok()) return false;
  outputs_.emplace_back(output);
  void* out = Data(output);
  const void* in = out;
  if (forwarded < 0) {
    if (!TakeInput(index, status)) return false;
    in = Data(inputs_[i].get());
  }
  buffers_.push_back({in, out, static_cast<uint64_t>(shape.count()), location_});
  return true;
}

bool Call::AllocateChunk(ddl_comm* comm, const Shape& shape, Status* status) {
  if (shape.rank() == 0) {
    status->Set(DDL_INVALID_ARGUMENT, "reduce_scatter '" + name_ +
                                          "': the tensor is split by rows, so it must have at least one dimension. "
                                          "Received: a scalar. Use all_reduce.");
    return false;
  }
  // The first ranks get one row more (ddl.h).
  const int64_t size = ddl_size(comm);
  Shape chunk = shape;
  chunk.dims[0] = shape.rows() / size + (ddl_rank(comm) < shape.rows() % size ? 1 : 0);
  const size_t bytes = static_cast<size_t>(chunk.count()) * ddl::DtypeSize(attributes_.dtype);
  TF_Tensor* output =
      TF_AllocateOutput(context_, 0, attributes_.tf_dtype, chunk.dims.data(), chunk.rank(), bytes, status->get());
  if (!status->ok()) return false;
  outputs_.emplace_back(output);
  buffers_.push_back({Data(inputs_[0].get()), Data(output), static_cast<uint64_t>(shape.count()), location_});
  return true;
}

void Call::Describe(int index, const Shape& shape) {
  fingerprint_ = ddl::HashNumber(static_cast<uint64_t>(shape.rank()), fingerprint_);
  for (size_t d = HasFreeRows() ? 1 : 0; d < shape.dims.size(); ++d) {
    fingerprint_ = ddl::HashNumber(static_cast<uint64_t>(shape.dims[d]), fingerprint_);
  }
  if (detail_.size() >= kDetailBytes) return;
  if (index > 0 || !detail_.empty()) detail_ += index > 0 ? ", " : ": ";
  detail_ += ddl::DtypeName(attributes_.dtype);
  detail_ += '[';
  for (size_t d = 0; d < shape.dims.size(); ++d) {
    if (d > 0) detail_ += ',';
    detail_ += std::to_string(shape.dims[d]);
  }
  detail_ += ']';
}

// Input 1 of an all_to_all.
bool Call::TakeSplits(ddl_comm* comm, ddl_request* request, Status* status) {
  if (!TakeInput(1, status)) return false;
  const Shape shape(inputs_[1].get());
  if (shape.rank() != 1 || shape.rows() != ddl_size(comm)) {
    status->Set(DDL_INVALID_ARGUMENT, "all_to_all '" + name_ + "': splits must be one number for each of " +
                                          std::to_string(ddl_size(comm)) + " ranks. Received: a tensor of " +
                                          std::to_string(shape.rank()) + " dimension(s), the first of " +
                                          std::to_string(shape.rows()) + ".");
    return false;
  }
  request->splits = static_cast<const int64_t*>(Data(inputs_[1].get()));
  return true;
}

// The collective waits for what the GPU's stream has to do up to now: the inputs, and the last uses of the memory that
// the outputs get.
bool Call::TakeStream(ddl_request* request, Status* status) {
  location_.kind = DDL_CUDA;
  request->stream = keras_ddl_gpu_stream(context_, &location_.id);
  if (request->stream != nullptr) return true;
  status->Set(DDL_INTERNAL, "'" + name_ +
                                "': the stream of TensorFlow's GPU must be known. Received: none from the library in "
                                "KERAS_DDL_TF_STREAM. Set KERAS_DDL_TF_STREAM=none on all ranks.");
  return false;
}

bool Call::Prepare(ddl_comm* comm, ddl_request* request, Status* status) {
  const int num_inputs = TF_NumInputs(context_);
  inputs_.resize(static_cast<size_t>(num_inputs));
  outputs_.reserve(inputs_.size());
  buffers_.reserve(inputs_.size());
  name_ = attributes_.name;
  // Iterations of a loop may overlap, in an order that differs between ranks, so they are different requests.
  if (const int64_t iteration = TF_GetIterId(context_); iteration > 0) name_ += "#" + std::to_string(iteration);
  detail_ = attributes_.detail;
  fingerprint_ = ddl::HashNumber(attributes_.fingerprint, fingerprint_);

  request->kind = attributes_.kind;
  request->dtype = attributes_.dtype;
  request->op = attributes_.op;
  request->root = attributes_.root;
  request->flags = attributes_.flags;
  request->tolerance = attributes_.tolerance;
  request->compression = attributes_.compression;
  request->feedback = attributes_.feedback.c_str();
  if (attributes_.on_gpu && !TakeStream(request, status)) return false;
  const bool has_splits = attributes_.kind == DDL_ALL_TO_ALL;
  if (has_splits && !TakeSplits(comm, request, status)) return false;
  for (int i = 0; i < (has_splits ? 1 : num_inputs); ++i) {
    if (!TakeInput(i, status)) return false;
    const Shape shape(inputs_[static_cast<size_t>(i)].get());
    Describe(i, shape);
    if (attributes_.kind == DDL_ALL_REDUCE || attributes_.kind == DDL_BROADCAST) {
      if (!AllocateLikeInput(i, shape, status)) return false;
      continue;
    }
    request->rows = static_cast<uint64_t>(shape.rows());
    request->row_count = static_cast<uint64_t>(shape.row_count());
    if (attributes_.kind == DDL_REDUCE_SCATTER) {
      if (!AllocateChunk(comm, shape, status)) return false;
    } else {
      gathered_dims_ = shape.dims;
      if (gathered_dims_.empty()) gathered_dims_.push_back(1);
      buffers_.push_back({Data(inputs_[0].get()), nullptr, static_cast<uint64_t>(shape.count()), location_});
    }
  }
  request->buffers = buffers_.data();
  request->num_buffers = static_cast<uint32_t>(buffers_.size());
  request->name = name_.c_str();
  request->detail = detail_.c_str();
  request->fingerprint = fingerprint_;
  // Random for every run of a graph and every eager op (observed with TensorFlow 2.21).
  request->step = static_cast<uint64_t>(TF_StepId(context_));
  request->plan = attributes_.plan;
  request->plan_run = ddl::HashNumber(static_cast<uint64_t>(TF_GetIterId(context_)), request->step);
  request->plan_index = attributes_.plan_index;
  request->plan_size = attributes_.plan_size;
  return true;
}

void* Call::Allocate(const uint64_t* rows_by_rank, int size) {
  int64_t rows = 0;
  for (int r = 0; r < size; ++r) rows += static_cast<int64_t>(rows_by_rank[r]);
  gathered_dims_[0] = rows;
  int64_t count = 1;
  for (int64_t dim : gathered_dims_) count *= dim;
  Status status;
  TensorPtr gathered(TF_AllocateOutput(context_, 0, attributes_.tf_dtype, gathered_dims_.data(),
                                       static_cast<int>(gathered_dims_.size()),
                                       static_cast<size_t>(count) * ddl::DtypeSize(attributes_.dtype), status.get()));
  if (!status.ok()) return nullptr;
  const int64_t size_dim = size;
  TensorPtr row_counts(TF_AllocateOutput(context_, 1, TF_INT64, &size_dim, 1,
                                         static_cast<size_t>(size) * sizeof(int64_t), status.get()));
  if (!status.ok()) return nullptr;
  int64_t* counts = static_cast<int64_t*>(TF_TensorData(row_counts.get()));
  for (int r = 0; r < size; ++r) counts[r] = static_cast<int64_t>(rows_by_rank[r]);
  void* out = Data(gathered.get());
  outputs_.push_back(std::move(gathered));
  outputs_.push_back(std::move(row_counts));
  return out;
}

uint64_t Bytes(const ddl_request& request) {
  uint64_t count = 0;
  for (uint32_t i = 0; i < request.num_buffers; ++i) count += request.buffers[i].count;
  return count * ddl::DtypeSize(static_cast<ddl_dtype>(request.dtype));
}

void* AllocateCallback(void* user, const uint64_t* rows_by_rank, int size) {
  return static_cast<Call*>(user)->Allocate(rows_by_rank, size);
}

void DoneCallback(void* user, const ddl_failure* failure) {
  std::unique_ptr<Call> call(static_cast<Call*>(user));
  call->Finish(failure);
}

// There is no communicator: before keras_ddl.init(), after keras_ddl.shutdown(), or after it was closed.
void FailNotFound(TF_OpKernelContext* context, const Attributes& attributes) {
  Status status;
  status.Set(DDL_NOT_FOUND,
             "'" + attributes.name + "': collectives need a running " +
                 (attributes.communicator == DDL_WORLD
                      ? "runtime. Received: none in this process (never started, or shut down). Call keras_ddl.init() "
                        "first."
                      : "communicator. Received: one that this process does not have (closed, or made by a split in "
                        "which this rank took no part). Make it again with split(), and trace the function again."));
  TF_OpKernelContext_Failure(context, status.get());
}

}  // namespace

void StartCollective(const Attributes& attributes, TF_OpKernelContext* context, std::function<void()> finish) {
  const HeldComm held(attributes.communicator);
  ddl_comm* comm = held.get();
  if (comm == nullptr) {
    FailNotFound(context, attributes);
    finish();
    return;
  }
  auto call = std::make_unique<Call>(attributes, context, finish);
  ddl_request request = {};
  Status status;
  if (!call->Prepare(comm, &request, &status)) {
    call.reset();
    TF_OpKernelContext_Failure(context, status.get());
    finish();
    return;
  }
  request.allocate = &AllocateCallback;  // only used if rows are free
  request.done = &DoneCallback;
  // From here on the call belongs to DoneCallback, which may have run before ddl_submit returns.
  request.user = call.release();
  // Small data is reduced sooner by this thread than by handing it to another. Large data, which would hold up
  // TensorFlow's thread, goes to the communication thread.
  if (Bytes(request) <= kInlineBytes && ddl_try_run(comm, &request, kInlinePatienceUs) == 1) {
    DoneCallback(request.user, nullptr);
    return;
  }
  ddl_submit(comm, &request);
}

}  // namespace keras_ddl::tf
