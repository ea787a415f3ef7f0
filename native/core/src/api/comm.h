// ddl_comm, for the sources of the C ABI.
#ifndef KERAS_DDL_CORE_API_COMM_H_
#define KERAS_DDL_CORE_API_COMM_H_

#include <atomic>
#include <memory>

#include "ddl.h"
#include "engine/engine.h"

struct ddl_comm {
  std::unique_ptr<ddl::Engine> engine;
  std::atomic<int> holders{1};
};

#endif  // KERAS_DDL_CORE_API_COMM_H_
