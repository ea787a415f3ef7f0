#include "control/terms.h"

#include <cstdio>
#include <cstdlib>

#include "kernels/kernels.h"

namespace ddl {

std::string KindText(const Terms& terms, const std::string&) { return KindName(static_cast<ddl_kind>(terms.kind)); }
std::string DtypeText(const Terms& terms, const std::string&) { return DtypeName(static_cast<ddl_dtype>(terms.dtype)); }
std::string OpText(const Terms& terms, const std::string&) { return OpName(static_cast<ddl_op>(terms.op)); }
std::string RootText(const Terms& terms, const std::string&) { return std::to_string(terms.root); }
std::string CountText(const Terms& terms, const std::string&) { return std::to_string(terms.count); }
std::string RowsText(const Terms& terms, const std::string&) { return std::to_string(terms.rows); }
std::string RowCountText(const Terms& terms, const std::string&) { return std::to_string(terms.row_count); }

std::string PlanText(const Terms& terms, const std::string& detail) {
  return detail.empty() ? "fingerprint " + std::to_string(terms.fingerprint) : detail;
}

std::string BaselineText(const Terms& terms, const std::string&) {
  if ((terms.flags & DDL_FLAG_CHECK) != 0) return "check";
  return (terms.flags & DDL_FLAG_PLAIN_MPI) != 0 ? "mpi" : "neither";
}

std::string LocationText(const Terms& terms, const std::string&) {
  return (terms.flags & kFlagByLibrary) != 0 ? "of a device" : "of the host";
}

std::string CompressionText(const Terms& terms, const std::string&) {
  return CompressionName(static_cast<ddl_compression>(terms.compression));
}

std::string ToleranceText(const Terms& terms, const std::string&) {
  if ((terms.flags & DDL_FLAG_CHECK) == 0) return "none";
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", terms.tolerance);
  if (std::strtod(text, nullptr) != terms.tolerance) std::snprintf(text, sizeof text, "%.17g", terms.tolerance);
  return text;
}

}  // namespace ddl
