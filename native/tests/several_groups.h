// Helpers for tests in which ranks act differently: the layouts to run on, and a sum that must work
// afterwards.
#ifndef KERAS_DDL_TESTS_SEVERAL_GROUPS_H_
#define KERAS_DDL_TESTS_SEVERAL_GROUPS_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "thread_group.h"

namespace ddl_test {

inline const std::vector<std::vector<int>>& Groups() {
  static const std::vector<std::vector<int>> groups = {{0, 0}, {0, 1}, {0, 0, 2, 2}, {0, 0, 0, 3, 3, 5}};
  return groups;
}

inline testing::AssertionResult Contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in: " << text;
}

inline Outcome SumOfOne(ddl_comm* comm, const std::string& name) {
  float value = 1;
  Call call(DDL_ALL_REDUCE, name);
  const Outcome outcome = call.Buffer(&value, &value, 1).Run(comm);
  if (outcome.code == DDL_OK && value != static_cast<float>(ddl_size(comm))) return {DDL_INTERNAL, "a wrong sum"};
  return outcome;
}

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_SEVERAL_GROUPS_H_
