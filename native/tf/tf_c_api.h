// tf_c_api.h: the part of TensorFlow's C API that the binding uses, declared here.
//
// With these declarations the build needs no TensorFlow, and one binary serves many versions of it: the C API is the
// only interface of TensorFlow that keeps its ABI. Read from tensorflow/c/{tf_status,tf_tensor,ops,kernels}.h, equal
// in 2.16 to 2.21. The symbols are those of libtensorflow_framework.so.2.
#ifndef KERAS_DDL_TF_TF_C_API_H_
#define KERAS_DDL_TF_TF_C_API_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_AsyncOpKernelDoneCallback TF_AsyncOpKernelDoneCallback;
typedef unsigned char TF_Bool;

typedef enum TF_Code {
  TF_OK = 0,
  TF_INVALID_ARGUMENT = 3,
  TF_FAILED_PRECONDITION = 9,
  TF_INTERNAL = 13,
} TF_Code;

typedef enum TF_DataType {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT8 = 6,
  TF_INT64 = 9,
  TF_BFLOAT16 = 14,
  TF_HALF = 19,
} TF_DataType;

typedef struct TF_StringView {
  const char* data;
  size_t len;
} TF_StringView;

// tf_status.h
TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, TF_Code, const char* message);
TF_Code TF_GetCode(const TF_Status*);
const char* TF_Message(const TF_Status*);

// tf_tensor.h
void TF_DeleteTensor(TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int index);
size_t TF_TensorByteSize(const TF_Tensor*);
void* TF_TensorData(const TF_Tensor*);

// ops.h
TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* op);
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderSetIsStateful(TF_OpDefinitionBuilder*, bool);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*, TF_Status*));
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext*);
TF_ShapeHandle* TF_NewShapeHandle(void);
void TF_DeleteShapeHandle(TF_ShapeHandle*);
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*);
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*);
TF_ShapeHandle* TF_ShapeInferenceContextVectorFromSize(TF_ShapeInferenceContext*, size_t size);
int64_t TF_ShapeInferenceContextRank(TF_ShapeInferenceContext*, TF_ShapeHandle*);
int TF_ShapeInferenceContextRankKnown(TF_ShapeInferenceContext*, TF_ShapeHandle*);
void TF_ShapeInferenceContextWithRankAtLeast(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t rank,
                                             TF_ShapeHandle* result, TF_Status*);
void TF_ShapeInferenceContextSubshape(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t start, int64_t end,
                                      TF_ShapeHandle* result, TF_Status*);
void TF_ShapeInferenceContextConcatenateShapes(TF_ShapeInferenceContext*, TF_ShapeHandle* first, TF_ShapeHandle* second,
                                               TF_ShapeHandle* result, TF_Status*);

// kernels.h
TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
TF_KernelBuilder* TF_NewAsyncKernelBuilder(const char* op, const char* device,
                                           void* (*create)(TF_OpKernelConstruction*),
                                           void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
                                           void (*destroy)(void*));
void TF_KernelBuilder_HostMemory(TF_KernelBuilder*, const char* argument);
void TF_KernelBuilder_TypeConstraint(TF_KernelBuilder*, const char* attr, TF_DataType, TF_Status*);
void TF_RegisterKernelBuilder(const char* kernel, TF_KernelBuilder*, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);
TF_StringView TF_OpKernelConstruction_GetName(TF_OpKernelConstruction*);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction*, const char* attr, int32_t* list_size,
                                         int32_t* total_size, TF_Status*);
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction*, const char* attr, char*, size_t max_length,
                                           TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char* attr, int64_t*, TF_Status*);
void TF_OpKernelConstruction_GetAttrFloat(TF_OpKernelConstruction*, const char* attr, float*, TF_Status*);
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction*, const char* attr, TF_Bool*, TF_Status*);
void TF_OpKernelConstruction_GetAttrType(TF_OpKernelConstruction*, const char* attr, TF_DataType*, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
int TF_NumInputs(TF_OpKernelContext*);
int64_t TF_GetIterId(TF_OpKernelContext*);
int64_t TF_StepId(TF_OpKernelContext*);
void TF_GetInput(TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, TF_DataType, const int64_t* dims, int num_dims,
                             size_t bytes, TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* candidates, int num_candidates, int index,
                                           const int64_t* dims, int num_dims, int* forwarded, TF_Status*);

}  // extern "C"

#endif  // KERAS_DDL_TF_TF_C_API_H_
