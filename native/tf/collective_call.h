// collective_call.h: one execution of a collective op, turned into a request of the core.
#ifndef KERAS_DDL_TF_COLLECTIVE_CALL_H_
#define KERAS_DDL_TF_COLLECTIVE_CALL_H_

#include <functional>

#include "attributes.h"
#include "tf_c_api.h"

namespace keras_ddl::tf {

// Submits what `context` holds to the communicator that the op names. `finish` is called exactly once, when the outputs
// or the failure are in `context`: on the communication thread, or here when the request cannot be made. Does not wait.
// Outputs are allocated here, in place of the inputs where TensorFlow allows it, except those of an all_gather or
// all_to_all, which are allocated as soon as the rows that come from every rank are known.
void StartCollective(const Attributes& attributes, TF_OpKernelContext* context, std::function<void()> finish);

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_COLLECTIVE_CALL_H_
