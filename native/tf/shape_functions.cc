#include "shape_functions.h"

#include "tf_handles.h"

namespace keras_ddl::tf {
namespace {

bool Ok(TF_Status* status) { return TF_GetCode(status) == TF_OK; }

// InferenceContext::kUnknownDim. The C API has no call that makes an unknown dimension, but passes this one through.
constexpr size_t kUnknownDim = static_cast<size_t>(-1);

// Sets output 0 to [?, dims 1.. of `input`].
void SetUnknownRows(TF_ShapeInferenceContext* context, TF_ShapeHandle* input, TF_Status* status) {
  ShapePtr rest(TF_NewShapeHandle());
  TF_ShapeInferenceContextSubshape(context, input, 1, TF_ShapeInferenceContextRank(context, input), rest.get(), status);
  if (!Ok(status)) return;
  ShapePtr rows(TF_ShapeInferenceContextVectorFromSize(context, kUnknownDim));
  ShapePtr output(TF_NewShapeHandle());
  TF_ShapeInferenceContextConcatenateShapes(context, rows.get(), rest.get(), output.get(), status);
  if (!Ok(status)) return;
  TF_ShapeInferenceContextSetOutput(context, 0, output.get(), status);
}

// Sets output 0 to the shape of input 0, which has rows, with an unknown number of them.
void SetLikeInputRows(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePtr input(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, 0, input.get(), status);
  if (!Ok(status)) return;
  if (!TF_ShapeInferenceContextRankKnown(context, input.get())) {
    // The input's unknown shape is the output's.
    TF_ShapeInferenceContextSetOutput(context, 0, input.get(), status);
    return;
  }
  ShapePtr checked(TF_NewShapeHandle());
  TF_ShapeInferenceContextWithRankAtLeast(context, input.get(), 1, checked.get(), status);
  if (!Ok(status)) return;
  SetUnknownRows(context, checked.get(), status);
}

}  // namespace

void SameShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePtr shape(TF_NewShapeHandle());
  const int64_t inputs = TF_ShapeInferenceContextNumInputs(context);
  for (int i = 0; i < inputs; ++i) {
    TF_ShapeInferenceContextGetInput(context, i, shape.get(), status);
    if (!Ok(status)) return;
    TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
    if (!Ok(status)) return;
  }
}

void ReduceScatterShape(TF_ShapeInferenceContext* context, TF_Status* status) { SetLikeInputRows(context, status); }

void AllToAllShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePtr splits(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, 1, splits.get(), status);
  if (!Ok(status)) return;
  TF_ShapeInferenceContextSetOutput(context, 1, splits.get(), status);
  if (!Ok(status)) return;
  SetLikeInputRows(context, status);
}

void AllGatherShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePtr rows(TF_ShapeInferenceContextVectorFromSize(context, kUnknownDim));
  TF_ShapeInferenceContextSetOutput(context, 1, rows.get(), status);
  if (!Ok(status)) return;
  ShapePtr input(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, 0, input.get(), status);
  if (!Ok(status)) return;
  if (!TF_ShapeInferenceContextRankKnown(context, input.get())) {
    TF_ShapeInferenceContextSetOutput(context, 0, input.get(), status);
  } else if (TF_ShapeInferenceContextRank(context, input.get()) == 0) {
    TF_ShapeInferenceContextSetOutput(context, 0, rows.get(), status);
  } else {
    SetUnknownRows(context, input.get(), status);
  }
}

}  // namespace keras_ddl::tf
