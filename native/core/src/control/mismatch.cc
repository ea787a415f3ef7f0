// DescribeMismatch: what ranks must agree on, and how a disagreement is reported.
#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "control/coordinator.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

using FieldText = std::function<std::string(const Announcement&)>;

struct Field {
  const char* name;
  bool (*applies)(const Announcement&);
  FieldText text;
};

bool Always(const Announcement&) { return true; }
bool Reduces(const Announcement& a) { return a.kind == DDL_ALL_REDUCE || a.kind == DDL_REDUCE_SCATTER; }
bool HasData(const Announcement& a) { return a.kind != DDL_BARRIER; }
bool HasRoot(const Announcement& a) { return a.kind == DDL_BROADCAST; }
bool HasEqualCount(const Announcement& a) { return HasData(a) && !HasFreeRows(a.kind); }
bool IsReduceScatter(const Announcement& a) { return a.kind == DDL_REDUCE_SCATTER; }
bool HasRows(const Announcement& a) { return IsReduceScatter(a) || HasFreeRows(a.kind); }

std::string Digits(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

const std::vector<Field>& Fields() {
  static const auto* fields = new std::vector<Field>{
      {"collective", Always, [](const Announcement& a) { return KindName(static_cast<ddl_kind>(a.kind)); }},
      {"dtype", HasData, [](const Announcement& a) { return DtypeName(static_cast<ddl_dtype>(a.dtype)); }},
      {"op", Reduces, [](const Announcement& a) { return OpName(static_cast<ddl_op>(a.op)); }},
      {"root", HasRoot, [](const Announcement& a) { return std::to_string(a.root); }},
      {"number of elements", HasEqualCount, [](const Announcement& a) { return std::to_string(a.count); }},
      {"rows", IsReduceScatter, [](const Announcement& a) { return std::to_string(a.rows); }},
      {"elements per row", HasRows, [](const Announcement& a) { return std::to_string(a.row_count); }},
      {"shapes or plan", Always,
       [](const Announcement& a) {
         return a.detail.empty() ? "fingerprint " + std::to_string(a.fingerprint) : a.detail;
       }},
      {"mpi/check", Always,
       [](const Announcement& a) -> std::string {
         if ((a.flags & DDL_FLAG_CHECK) != 0) return "check within " + Digits(a.tolerance, 6);
         return (a.flags & DDL_FLAG_PLAIN_MPI) != 0 ? "mpi" : "neither";
       }},
  };
  return *fields;
}

// The exact value to compare; the text shown may be shortened or only explanatory.
std::string Compared(const Field& field, const Announcement& a) {
  if (field.name == std::string("shapes or plan")) return std::to_string(a.fingerprint);
  if (field.name != std::string("mpi/check")) return field.text(a);
  const uint32_t flags = a.flags & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK);
  return std::to_string(flags) + ((flags & DDL_FLAG_CHECK) != 0 ? ", tolerance " + Digits(a.tolerance, 17) : "");
}

// The comparison made for every call; the table above is for messages only. Fields that do not apply are ignored.
bool Agree(const Announcement& a, const Announcement& b) {
  return a.kind == b.kind && (!HasData(a) || a.dtype == b.dtype) && (!Reduces(a) || a.op == b.op) &&
         (!HasRoot(a) || a.root == b.root) && (!HasEqualCount(a) || a.count == b.count) &&
         (!IsReduceScatter(a) || a.rows == b.rows) && (!HasRows(a) || a.row_count == b.row_count) &&
         a.fingerprint == b.fingerprint && a.tolerance == b.tolerance &&
         ((a.flags ^ b.flags) & (DDL_FLAG_PLAIN_MPI | DDL_FLAG_CHECK)) == 0;
}

}  // namespace

std::string DescribeMismatch(const std::vector<Submission>& submissions) {
  const Announcement& first = submissions[0].announcement;
  bool agree = true;
  for (const Submission& submission : submissions) agree = agree && Agree(first, submission.announcement);
  if (agree) return {};
  std::string differences;
  for (const Field& field : Fields()) {
    if (!field.applies(first)) continue;
    // Ranks and text by value, in the order of their lowest rank.
    std::vector<std::string> values;
    std::vector<std::string> texts;
    std::vector<std::vector<int>> ranks;
    for (const auto& [rank, announcement] : submissions) {
      const std::string value = Compared(field, announcement);
      size_t i = 0;
      while (i < values.size() && values[i] != value) ++i;
      if (i == values.size()) {
        values.push_back(value);
        texts.push_back(field.text(announcement));
        ranks.emplace_back();
      }
      ranks[i].push_back(rank);
    }
    if (values.size() == 1) continue;
    if (!differences.empty()) differences += "; ";
    differences += std::string(field.name) + ": ";
    const bool texts_differ = std::set<std::string>(texts.begin(), texts.end()).size() == values.size();
    for (size_t i = 0; i < values.size(); ++i) {
      differences += (i > 0 ? ", " : "") + texts[i];
      if (!texts_differ) differences += " (" + values[i] + ")";
      differences += " on rank(s) " + FormatRanks(ranks[i]);
    }
    // Another collective under the same name: its other fields differ for that reason alone.
    if (field.name == std::string("collective")) break;
  }
  if (differences.empty()) return {};
  return "ranks disagree on '" + first.name + "': " + differences +
         ". All ranks must submit the same collective, of equal shape, dtype and op, under one name.";
}

}  // namespace ddl
