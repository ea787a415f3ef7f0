// Trace: a timeline of this process's collectives and steps, in the trace-event format that chrome://tracing and
// Perfetto read (a JSON array; they also read one that a killed process left unterminated).
//
// All communicators of a process share one trace, which is off until Start. When off, it costs one relaxed load per
// collective. For each collective it records the times at which this process submitted it, all ranks had agreed to run
// it, it started and it finished. Times come from the host's wall clock, so that the files of several ranks line up.
// A program that watches itself can keep the newest collectives in memory, with or without a file.
#ifndef KERAS_DDL_CORE_BASE_TRACE_H_
#define KERAS_DDL_CORE_BASE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "ddl.h"

namespace ddl {

class Trace {
 public:
  // Opens `path` (overwriting it) and starts recording. `rank` and `label` identify this process.
  static Status Start(const std::string& path, int rank, const std::string& label);
  // Flushes and closes the file. Does nothing when none is open.
  static Status Stop();

  // Keeps the newest `capacity` collectives for Take. 0: keeps no more.
  static void Keep(uint32_t capacity);
  // Moves up to `count` of the kept collectives, oldest first, to `out`. Returns their number.
  static uint32_t Take(ddl_traced* out, uint32_t count);

  static bool On() { return on_.load(std::memory_order_relaxed); }
  // Seconds of Now() when on, else 0: for stamps that only a trace reads.
  static double Stamp();

  struct Collective {
    const char* kind;
    std::string_view name;
    uint64_t bytes;                               // of this rank's input
    int code;                                     // ddl_code
    double submitted, agreed, started, finished;  // seconds of Now(); `agreed`: 0 when no coordination was needed
  };
  // Does nothing when off, or when the collective began before Start (a stamp is 0). If memory is short, this and Span
  // record nothing, because the recorded work must not fail for that.
  static void Add(const Collective& collective);
  // A span of the program, such as a training step, on its own line. Seconds of Now().
  static void Span(std::string_view name, double begin, double end);

 private:
  static void Record(const Collective& collective);
  static std::atomic<bool> on_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TRACE_H_
