// shape_functions.h: what TensorFlow may know about an op's outputs before it runs.
#ifndef KERAS_DDL_TF_SHAPE_FUNCTIONS_H_
#define KERAS_DDL_TF_SHAPE_FUNCTIONS_H_

#include "tf_c_api.h"

namespace keras_ddl::tf {

// Output i has the shape of input i.
void SameShapes(TF_ShapeInferenceContext* context, TF_Status* status);

// [n, ...] -> [?, ...]: the rows of this rank's chunk depend on the rank, and a traced graph must not.
void ReduceScatterShape(TF_ShapeInferenceContext* context, TF_Status* status);

// [n, ...] -> [?, ...], and [?] rows of each rank; a scalar gives [?].
void AllGatherShape(TF_ShapeInferenceContext* context, TF_Status* status);

// [n, ...] and [size] splits -> [?, ...] and [size] rows of each rank.
void AllToAllShape(TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_SHAPE_FUNCTIONS_H_
