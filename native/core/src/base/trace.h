// Trace: a timeline of this process's collectives and steps, in the trace-event format that chrome://tracing and
// Perfetto read (a JSON array; one that a killed process left without its end is read all the same).
//
// One per process, whatever the number of communicators; off until Start. What it costs when off is one relaxed load
// per collective. Each collective gives: when it was submitted here, when all ranks had agreed to run it, when it
// started and when it finished. Times are those of the host's wall clock, so that the files of several ranks fit.
#ifndef KERAS_DDL_CORE_BASE_TRACE_H_
#define KERAS_DDL_CORE_BASE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace ddl {

class Trace {
 public:
  // Opens `path` (what it held is lost) and begins. `rank` and `label` say whose process this is.
  static Status Start(const std::string& path, int rank, const std::string& label);
  // Writes what is left and closes the file. Does nothing when there is none.
  static Status Stop();

  static bool On() { return on_.load(std::memory_order_relaxed); }
  // Seconds of Now() when on, else 0: for stamps that only a trace reads.
  static double Stamp();

  struct Collective {
    const char* kind;
    const std::string& name;
    uint64_t bytes;                               // of this rank's input
    int code;                                     // ddl_code
    double submitted, agreed, started, finished;  // seconds of Now(); `agreed`: 0 when nobody had to be asked
  };
  // Does nothing when off, or when the collective began before Start (a stamp is 0).
  static void Add(const Collective& collective);
  // A span of the program, such as a training step, on its own line. Seconds of Now().
  static void Span(const std::string& name, double begin, double end);

 private:
  static std::atomic<bool> on_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_BASE_TRACE_H_
