// A ddl_transport between threads of one process, for tests: ranks are threads, messages are memory.
//
// It behaves as an MPI library may, not as the kindest one would: messages above the eager limit are read from the
// sender's buffer when the receiver comes for them, and a send is finished only then.
#ifndef KERAS_DDL_TESTS_THREAD_TRANSPORT_H_
#define KERAS_DDL_TESTS_THREAD_TRANSPORT_H_

#include <cstddef>
#include <vector>

#include "ddl.h"

namespace ddl_test {

constexpr size_t kEagerBytes = 4096;

// One transport for each rank. Each must be destroyed, by ddl_destroy or through its own `destroy`; what they share
// goes with the last. all_gather, plain_all_reduce and share expect every rank (share: every rank of the group) on a
// thread of its own.
std::vector<ddl_transport> MakeThreadTransports(int size);

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_THREAD_TRANSPORT_H_
