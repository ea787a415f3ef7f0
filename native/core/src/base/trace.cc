#include "base/trace.h"

#include <time.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "base/guard.h"
#include "base/waiter.h"
#include "ddl.h"

namespace ddl {
namespace {

// Written in pieces of this size: rarely, and little is lost when the process is killed.
constexpr size_t kPieceBytes = 64 * 1024;
// Lines of the picture ("threads" of the format) within a rank.
constexpr int kStepLine = 1;
constexpr int kCommunicationLine = 2;

struct Writer {
  std::mutex mutex;
  // All below: guarded by mutex.
  std::FILE* file = nullptr;
  std::string text;
  int rank = 0;
  uint64_t waits = 0;
  double wall_minus_monotonic = 0;
  std::deque<ddl_traced> kept;
  size_t capacity = 0;
};

Writer& TheWriter() {
  static Writer* writer = new Writer();  // never freed: a communication thread may outlive static objects
  return *writer;
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      quoted += code;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

double WallMinusMonotonic() {
  timespec wall{};
  const double before = Now();
  clock_gettime(CLOCK_REALTIME, &wall);
  return static_cast<double>(wall.tv_sec) + 1e-9 * static_cast<double>(wall.tv_nsec) - (before + Now()) / 2;
}

std::string Microseconds(double seconds) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", seconds * 1e6);
  return text;
}

// REQUIRES for all below: the mutex is held.
void KeepOne(Writer& writer, const Trace::Collective& c, double agreed) {
  if (writer.kept.size() >= writer.capacity) writer.kept.pop_front();
  ddl_traced& one = writer.kept.emplace_back(ddl_traced{{}, c.bytes, c.submitted, agreed, c.started, c.finished});
  const size_t skipped = c.name.size() < sizeof one.name ? 0 : c.name.size() - sizeof one.name + 1;
  c.name.copy(one.name, sizeof one.name - 1, skipped);
}

void Write(Writer& writer) {
  std::fwrite(writer.text.data(), 1, writer.text.size(), writer.file);
  std::fflush(writer.file);
  writer.text.clear();
}

// `rest`: the members after those that every event has.
void Event(Writer& writer, char phase, int line, std::string_view name, const std::string& rest) {
  std::string event = writer.text.empty() && std::ftell(writer.file) == 0 ? "[\n" : ",\n";
  event += "{\"ph\":\"";
  event += phase;
  event += "\",\"pid\":" + std::to_string(writer.rank) + ",\"tid\":" + std::to_string(line) +
           ",\"name\":" + Quoted(name) + rest + "}";
  writer.text += event;  // all of it or nothing
  if (writer.text.size() > kPieceBytes) Write(writer);
}

void Complete(Writer& writer, int line, std::string_view name, double begin, double end, const std::string& rest) {
  Event(
      writer, 'X', line, name,
      ",\"ts\":" + Microseconds(begin + writer.wall_minus_monotonic) + ",\"dur\":" + Microseconds(end - begin) + rest);
}

// Waits of different collectives overlap, so each wait has its own line: a pair of "async" events.
void Wait(Writer& writer, const char* why, double begin, double end) {
  const std::string id = ",\"cat\":\"wait\",\"id\":" + std::to_string(writer.waits) + ",\"ts\":";
  Event(writer, 'b', kCommunicationLine, why, id + Microseconds(begin + writer.wall_minus_monotonic));
  Event(writer, 'e', kCommunicationLine, why, id + Microseconds(end + writer.wall_minus_monotonic));
}

}  // namespace

std::atomic<bool> Trace::on_{false};

Status Trace::Start(const std::string& path, int rank, const std::string& label) {
  Writer& writer = TheWriter();
  const std::lock_guard<std::mutex> lock(writer.mutex);
  if (writer.file != nullptr) return {DDL_FAILED_PRECONDITION, "a timeline is being written already"};
  writer.file = std::fopen(path.c_str(), "w");
  if (writer.file == nullptr) return {DDL_INVALID_ARGUMENT, path + ": " + std::strerror(errno)};
  writer.rank = rank;
  writer.waits = 0;
  writer.wall_minus_monotonic = WallMinusMonotonic();
  const auto name = [&](const char* what, int line, const std::string& text) {
    Event(writer, 'M', line, what, ",\"args\":{\"name\":" + Quoted(text) + "}");
  };
  const bool begun = Completes([&] {
    name("process_name", 0, label);
    name("thread_name", kStepLine, "steps");
    name("thread_name", kCommunicationLine, "collectives");
  });
  if (!begun) {
    writer.text.clear();
    std::fclose(std::exchange(writer.file, nullptr));
    return OutOfMemory();
  }
  on_ = true;
  return {};
}

Status Trace::Stop() {
  Writer& writer = TheWriter();
  const std::lock_guard<std::mutex> lock(writer.mutex);
  on_ = writer.capacity > 0;
  if (writer.file == nullptr) return {};
  Write(writer);
  std::fputs("\n]\n", writer.file);
  const bool failed = std::ferror(writer.file) != 0;
  const bool unclosed = std::fclose(writer.file) != 0;
  writer.file = nullptr;
  if (failed || unclosed) return {DDL_INTERNAL, std::string("the timeline is incomplete: ") + std::strerror(errno)};
  return {};
}

void Trace::Keep(uint32_t capacity) {
  Writer& writer = TheWriter();
  const std::lock_guard<std::mutex> lock(writer.mutex);
  writer.capacity = capacity;
  writer.kept.clear();
  on_ = capacity > 0 || writer.file != nullptr;
}

uint32_t Trace::Take(ddl_traced* out, uint32_t count) {
  Writer& writer = TheWriter();
  const std::lock_guard<std::mutex> lock(writer.mutex);
  uint32_t taken = 0;
  for (; taken < count && !writer.kept.empty(); ++taken) {
    out[taken] = writer.kept.front();
    writer.kept.pop_front();
  }
  return taken;
}

double Trace::Stamp() { return On() ? Now() : 0; }

void Trace::Add(const Collective& c) {
  if (!On() || c.submitted == 0 || c.started == 0) return;
  (void)Completes([&] { Record(c); });
}

void Trace::Record(const Collective& c) {
  Writer& writer = TheWriter();
  const std::lock_guard<std::mutex> lock(writer.mutex);
  const double agreed = c.agreed == 0 ? c.started : c.agreed;
  if (writer.capacity > 0) KeepOne(writer, c, agreed);
  if (writer.file == nullptr) return;
  ++writer.waits;
  Wait(writer, "wait for ranks", c.submitted, agreed);
  if (c.started > agreed) Wait(writer, "wait for its turn", agreed, c.started);
  std::string rest = std::string(",\"cat\":\"") + c.kind + "\",\"args\":{\"bytes\":" + std::to_string(c.bytes) +
                     ",\"waited_for_ranks_us\":" + Microseconds(agreed - c.submitted) +
                     ",\"waited_for_turn_us\":" + Microseconds(c.started - agreed);
  if (c.code != DDL_OK) rest += ",\"error\":" + std::to_string(c.code);
  Complete(writer, kCommunicationLine, c.name, c.started, c.finished, rest + "}");
}

void Trace::Span(std::string_view name, double begin, double end) {
  if (!On()) return;
  (void)Completes([&] {
    Writer& writer = TheWriter();
    const std::lock_guard<std::mutex> lock(writer.mutex);
    if (writer.file != nullptr) Complete(writer, kStepLine, name, begin, end, ",\"cat\":\"step\"");
  });
}

}  // namespace ddl
