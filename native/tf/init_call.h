// init_call.h: DdlInit, which tells a graph where it runs.
#ifndef KERAS_DDL_TF_INIT_CALL_H_
#define KERAS_DDL_TF_INIT_CALL_H_

#include <functional>
#include <string>

#include "tf_c_api.h"

namespace keras_ddl::tf {

struct InitAttributes {
  std::string mode;
  std::string pci;
};

bool ReadInitAttributes(TF_OpKernelConstruction* construction, InitAttributes* attributes);

// Outputs rank, size, local_rank, local_size and the device id: the preferred one, or local_rank when it is negative.
// COLLECTIVE: every rank, with equal mode. Fails on every rank when two ranks of one host name the same PCI device.
// `finish` as in StartCollective.
void StartInit(const InitAttributes& attributes, TF_OpKernelContext* context, std::function<void()> finish);

}  // namespace keras_ddl::tf

#endif  // KERAS_DDL_TF_INIT_CALL_H_
