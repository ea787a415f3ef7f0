// Helpers for tests of the control plane of thousands of ranks: imaginary ranks and their announcements.
#ifndef KERAS_DDL_TESTS_CONTROL_ANNOUNCED_H_
#define KERAS_DDL_TESTS_CONTROL_ANNOUNCED_H_

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "control/message.h"
#include "liveness/rank_locations.h"

namespace ddl_test {

// Locations of `size` ranks that do not run anywhere.
inline ddl::RankLocations Nowhere(int size) {
  ddl_transport transport{};
  transport.size = size;
  transport.all_gather = [](void*, const void* in, void* out, size_t bytes) {
    std::memcpy(out, in, bytes);
    return static_cast<int>(DDL_OK);
  };
  ddl::RankLocations locations;
  EXPECT_TRUE(ddl::RankLocations::Exchange(transport, &locations).ok());
  return locations;
}

inline ddl::Announcement Bucket(const std::string& name, uint64_t step) {
  ddl::Announcement a;
  a.kind = DDL_ALL_REDUCE;
  a.count = 1000;
  a.step = step;
  a.name = name;
  a.detail = "float32[1000]";
  return a;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_CONTROL_ANNOUNCED_H_
