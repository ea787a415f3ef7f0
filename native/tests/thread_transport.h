// A ddl_transport between threads of one process, for tests: ranks are threads, messages are memory.
//
// It is as strict as an MPI library may be: messages above the eager limit are read from the sender's buffer
// when the receiver asks for them, and only then does the send finish.
#ifndef KERAS_DDL_TESTS_THREAD_TRANSPORT_H_
#define KERAS_DDL_TESTS_THREAD_TRANSPORT_H_

#include <cstddef>
#include <vector>

#include "ddl.h"

namespace ddl_test {

constexpr size_t kEagerBytes = 4096;

// Returns one transport for each rank. Each must be destroyed, by ddl_destroy or its own `destroy`; their shared state
// is freed with the last one. all_gather, plain_all_reduce and share need every rank (share: every rank of the group)
// on its own thread.
std::vector<ddl_transport> MakeThreadTransports(int size);

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_THREAD_TRANSPORT_H_
