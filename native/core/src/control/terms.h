// Terms: the values of a collective that must be equal on all ranks. This is the only list of them. A rendezvous, a
// plan and the coordinator compare these values, and errors name them.
#ifndef KERAS_DDL_CORE_CONTROL_TERMS_H_
#define KERAS_DDL_CORE_CONTROL_TERMS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "ddl.h"

namespace ddl {

// A flag in Terms.flags, in addition to the flags of ddl_request: this rank's buffers are on a device whose library is
// to run the collective.
constexpr uint32_t kFlagByLibrary = 1u << 31;

struct Terms {
  uint32_t kind = 0;
  uint32_t dtype = 0;
  uint32_t op = 0;
  int32_t root = 0;
  uint32_t flags = 0;
  uint32_t compression = 0;
  uint64_t count = 0;
  uint64_t row_count = 0;
  uint64_t rows = 0;
  uint64_t fingerprint = 0;
  double tolerance = 0;
};

// Whether ranks may have different numbers of rows; outputs are then allocated when all numbers are known.
constexpr bool HasFreeRows(uint32_t kind) { return kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL; }
constexpr bool Reduces(uint32_t kind) { return kind == DDL_ALL_REDUCE || kind == DDL_REDUCE_SCATTER; }
constexpr bool HasData(uint32_t kind) { return kind != DDL_BARRIER; }

// The text of a value in an error. `detail`: the caller's description of shapes or plan.
std::string KindText(const Terms& terms, const std::string& detail);
std::string DtypeText(const Terms& terms, const std::string& detail);
std::string OpText(const Terms& terms, const std::string& detail);
std::string RootText(const Terms& terms, const std::string& detail);
std::string CountText(const Terms& terms, const std::string& detail);
std::string RowsText(const Terms& terms, const std::string& detail);
std::string RowCountText(const Terms& terms, const std::string& detail);
std::string PlanText(const Terms& terms, const std::string& detail);
std::string BaselineText(const Terms& terms, const std::string& detail);
std::string LocationText(const Terms& terms, const std::string& detail);
std::string CompressionText(const Terms& terms, const std::string& detail);
std::string ToleranceText(const Terms& terms, const std::string& detail);

struct Term {
  const char* name;
  int bits;                         // of `value`
  uint64_t (*value)(const Terms&);  // the value to compare; 0 if the kind does not use it
  std::string (*text)(const Terms&, const std::string& detail);
};

// In the order in which errors name them.
inline constexpr Term kTerms[] = {
    {"collective", 4, [](const Terms& t) -> uint64_t { return t.kind; }, KindText},
    {"dtype", 8, [](const Terms& t) -> uint64_t { return HasData(t.kind) ? t.dtype : 0; }, DtypeText},
    {"op", 4, [](const Terms& t) -> uint64_t { return Reduces(t.kind) ? t.op : 0; }, OpText},
    {"root", 32, [](const Terms& t) -> uint64_t { return t.kind == DDL_BROADCAST ? static_cast<uint32_t>(t.root) : 0; },
     RootText},
    {"number of elements", 64, [](const Terms& t) { return HasData(t.kind) && !HasFreeRows(t.kind) ? t.count : 0; },
     CountText},
    {"rows", 64, [](const Terms& t) { return t.kind == DDL_REDUCE_SCATTER ? t.rows : 0; }, RowsText},
    {"elements per row", 64,
     [](const Terms& t) { return t.kind == DDL_REDUCE_SCATTER || HasFreeRows(t.kind) ? t.row_count : 0; },
     RowCountText},
    {"shapes or plan", 64, [](const Terms& t) { return t.fingerprint; }, PlanText},
    {"mpi/check", 4, [](const Terms& t) -> uint64_t { return t.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK); },
     BaselineText},
    {"memory", 4, [](const Terms& t) -> uint64_t { return (t.flags & kFlagByLibrary) != 0 ? 1 : 0; }, LocationText},
    {"compression", 8, [](const Terms& t) -> uint64_t { return t.compression; }, CompressionText},
    {"tolerance of the check", 64,
     [](const Terms& t) {
       uint64_t bits = 0;
       if ((t.flags & DDL_FLAG_CHECK) != 0) std::memcpy(&bits, &t.tolerance, sizeof bits);
       return bits;
     },
     ToleranceText},
};
constexpr size_t kNumTerms = sizeof kTerms / sizeof kTerms[0];

// All values of the list, with the narrow ones together in the first word and the tolerance last. Together with the
// other values that a rendezvous exchanges they fill one cache line.
constexpr size_t kTermWords = 6;
using TermWords = std::array<uint64_t, kTermWords>;

template <size_t... kIndex>
TermWords WordsOf(const Terms& terms, std::index_sequence<kIndex...>) {
  TermWords words{};
  size_t next = 1;
  int shift = 0;
  const auto put = [&](int bits, uint64_t value) {
    if (bits == 64) {
      words[next++] = value;
    } else {
      words[0] |= value << shift;
      shift += bits;
    }
  };
  (put(kTerms[kIndex].bits, kTerms[kIndex].value(terms)), ...);
  return words;
}
inline TermWords WordsOf(const Terms& terms) { return WordsOf(terms, std::make_index_sequence<kNumTerms>()); }

constexpr size_t WordsOfTerms() {
  size_t words = 1;
  int narrow = 0;
  for (const Term& term : kTerms) {
    words += term.bits == 64 ? 1 : 0;
    narrow += term.bits == 64 ? 0 : term.bits;
  }
  return narrow <= 64 ? words : 0;
}
static_assert(WordsOfTerms() == kTermWords, "the list has changed");
static_assert(DDL_NUM_KINDS <= 16 && DDL_NUM_OPS <= 16, "as many bits as the list says");
static_assert(DDL_FLAG_PLAIN_MPI < 16 && DDL_FLAG_CHECK < 16, "as many bits as the list says");

}  // namespace ddl
#endif  // KERAS_DDL_CORE_CONTROL_TERMS_H_
