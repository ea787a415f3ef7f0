#include "control/message.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "base/text.h"
#include "control/known_collectives.h"

namespace ddl {
namespace {

// A flag in the number of values: only one value follows, because all are equal.
constexpr uint32_t kAllEqual = 1u << 31;
// Between the parts of a Position.
constexpr char kUnitSeparator = '\x1f';

class Writer {
 public:
  explicit Writer(MessageType type) { bytes_.push_back(static_cast<char>(type)); }

  template <typename T>
  Writer& Put(T value) {
    static_assert(std::is_arithmetic_v<T>, "fixed-size values only");
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& Put(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  template <typename T>
  Writer& Put(const std::vector<T>& values) {
    Put(static_cast<uint32_t>(values.size()));
    for (const T& value : values) Put(value);
    return *this;
  }
  // Writes one value if all are equal.
  Writer& PutAlike(const std::vector<uint64_t>& values) {
    const auto differs = [&](uint64_t value) { return value != values[0]; };
    if (values.size() < 2 || std::any_of(values.begin(), values.end(), differs)) return Put(values);
    return Put(static_cast<uint32_t>(values.size()) | kAllEqual).Put(values[0]);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : at_(bytes.data() + 1), end_(bytes.data() + bytes.size()) {}

  template <typename T>
  T Get() {
    T value{};
    if (at_ + sizeof value <= end_) std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string GetText() {
    const auto size = Get<uint32_t>();
    if (at_ + size > end_) return {};
    std::string text(at_, size);
    at_ += size;
    return text;
  }
  std::vector<uint64_t> GetAlike() {
    const auto count = Get<uint32_t>();
    std::vector<uint64_t> values(count & ~kAllEqual);
    if ((count & kAllEqual) != 0) {
      std::fill(values.begin(), values.end(), Get<uint64_t>());
    } else {
      for (uint64_t& value : values) value = Get<uint64_t>();
    }
    return values;
  }
  template <typename T>
  std::vector<T> GetList() {
    std::vector<T> values(Get<uint32_t>());
    for (T& value : values) value = Get<T>();
    return values;
  }

 private:
  const char* at_;
  const char* end_;
};

void Put(Writer& out, const Announcement& a) {
  out.Put(a.kind)
      .Put(a.dtype)
      .Put(a.op)
      .Put(a.root)
      .Put(a.flags)
      .Put(a.compression)
      .Put(a.count)
      .Put(a.row_count)
      .Put(a.rows)
      .Put(a.fingerprint)
      .Put(a.step)
      .Put(a.tolerance)
      .Put(a.splits)
      .Put(a.name)
      .Put(a.detail);
}

Announcement GetAnnouncement(Reader& in) {
  Announcement a;
  a.kind = in.Get<uint32_t>();
  a.dtype = in.Get<uint32_t>();
  a.op = in.Get<uint32_t>();
  a.root = in.Get<int32_t>();
  a.flags = in.Get<uint32_t>();
  a.compression = in.Get<uint32_t>();
  a.count = in.Get<uint64_t>();
  a.row_count = in.Get<uint64_t>();
  a.rows = in.Get<uint64_t>();
  a.fingerprint = in.Get<uint64_t>();
  a.step = in.Get<uint64_t>();
  a.tolerance = in.Get<double>();
  a.splits = in.GetList<int64_t>();
  a.name = in.GetText();
  a.detail = in.GetText();
  return a;
}

}  // namespace

std::string EncodeAnnouncement(const Announcement& announcement) {
  Writer out(MessageType::kAnnounce);
  Put(out, announcement);
  return out.Take();
}

Announcement DecodeAnnouncement(const std::string& bytes) {
  Reader in(bytes);
  return GetAnnouncement(in);
}

std::string ContentsOf(const Announcement& announcement) {
  Announcement contents = announcement;
  contents.step = 0;
  return EncodeAnnouncement(contents);
}

std::string EncodeKnown(uint32_t id, uint64_t step) {
  return Writer(MessageType::kAnnounceKnown).Put(id).Put(step).Take();
}

uint32_t DecodeKnown(const std::string& bytes, uint64_t* step) {
  Reader in(bytes);
  const auto id = in.Get<uint32_t>();
  *step = in.Get<uint64_t>();
  return id;
}

std::string EncodeDecision(const Decision& d) {
  if (d.id != 0 && !d.gives_id) return Writer(MessageType::kDecideKnown).Put(d.id).PutAlike(d.rows).Take();
  Writer out(MessageType::kDecide);
  out.Put(static_cast<int32_t>(d.code)).Put(d.name).Put(Truncate(d.message, kMaxError));
  out.Put(static_cast<uint32_t>(d.ranks.size()));
  for (const ddl_failed_rank& failed : d.ranks) out.Put(failed.rank).Put(failed.role);
  out.PutAlike(d.rows).Put(d.last_joined).Put(d.joined).Put(d.id);
  if (!d.joined.empty()) Put(out, *d.submitted);
  return out.Take();
}

Decision DecodeDecision(const std::string& bytes) {
  Reader in(bytes);
  Decision d;
  if (TypeOf(bytes) == MessageType::kDecideKnown) {
    d.id = in.Get<uint32_t>();
    d.rows = in.GetAlike();
    return d;
  }
  d.code = static_cast<ddl_code>(in.Get<int32_t>());
  d.name = in.GetText();
  d.message = in.GetText();
  d.ranks.resize(in.Get<uint32_t>());
  for (ddl_failed_rank& failed : d.ranks) failed = {in.Get<int32_t>(), in.Get<uint32_t>()};
  d.rows = in.GetAlike();
  d.last_joined = in.Get<int32_t>();
  d.joined = in.GetList<int32_t>();
  d.id = in.Get<uint32_t>();
  d.gives_id = d.id != 0;
  if (!d.joined.empty()) d.submitted = GetAnnouncement(in);
  return d;
}

std::string Position::Encode() const {
  std::string text = where;
  text += kUnitSeparator;
  text += std::to_string(idle_s);
  text += kUnitSeparator;
  text += std::to_string(pending);
  return text;
}

Position Position::Decode(const std::string& text) {
  Position position;
  const size_t idle = text.find(kUnitSeparator);
  position.where = text.substr(0, idle);
  if (idle == std::string::npos) return position;
  position.idle_s = std::strtod(text.c_str() + idle + 1, nullptr);
  const size_t pending = text.find(kUnitSeparator, idle + 1);
  if (pending != std::string::npos) position.pending = std::strtoull(text.c_str() + pending + 1, nullptr, 10);
  return position;
}

std::string EncodeText(MessageType type, const std::string& text) {
  return Writer(type).Put(Truncate(text, kMaxError)).Take();
}

std::string DecodeText(const std::string& bytes) { return Reader(bytes).GetText(); }

MessageType TypeOf(const std::string& bytes) { return static_cast<MessageType>(bytes.empty() ? 0 : bytes[0]); }

}  // namespace ddl
