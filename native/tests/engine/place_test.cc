// ddl_allocate_in_place: results that get their memory before the other ranks' rows are known.
#include <gtest/gtest.h>

#include <cstdint>

#include "ddl.h"

namespace {

TEST(PlaceTest, IsUsedWhenTheRowsOfAllRanksFillIt) {
  float out[12];
  ddl_place place{out, 2, 6};
  const uint64_t rows[] = {1, 2, 3};
  EXPECT_EQ(ddl_allocate_in_place(&place, rows, 3), out);
}

TEST(PlaceTest, IsRefusedWhenRowsAreMoreOrFewer) {
  float out[12];
  ddl_place place{out, 2, 6};
  const uint64_t more[] = {1, 2, 4}, fewer[] = {1, 2, 2};
  EXPECT_EQ(ddl_allocate_in_place(&place, more, 3), nullptr);
  EXPECT_EQ(ddl_allocate_in_place(&place, fewer, 3), nullptr);
}

}  // namespace
