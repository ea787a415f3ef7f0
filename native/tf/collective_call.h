// collective_call.h: one execution of a collective op, turned into a request of the core.
#ifndef KERAS_DDL_TF_COLLECTIVE_CALL_H_
#define KERAS_DDL_TF_COLLECTIVE_CALL_H_

#include <functional>

#include "attributes.h"
#include "tf_c_api.h"

namespace keras_ddl::tf {

// Submits the inputs in `context` to the communicator that the op names. `finish` is called exactly once, when the
// outputs or the failure are in `context`: on the communication thread, or here if the request cannot be made. Does not
// wait. Outputs are allocated here, in place of the inputs if TensorFlow allows it. Only the outputs of an all_gather
// or all_to_all are allocated later, when the rows from every rank are known.
void StartCollective(const Attributes& attributes, TF_OpKernelContext* context, std::function<void()> finish);

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_COLLECTIVE_CALL_H_
