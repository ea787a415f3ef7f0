#include "net/outer_all_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/float16_mean.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

constexpr size_t kRoundedBytes = 2;  // bytes of a rounded element

// The factor that keeps the numbers of a part from overflowing in float16, even if they are rounded up.
float ScaleOf(float largest) {
  if (largest == 0) return 1;
  int exponent = 0;
  std::frexp(largest, &exponent);                                 // largest < 2^exponent
  return std::ldexp(1.0f, std::clamp(15 - exponent, -113, 126));  // it and its reciprocal are normal
}

}  // namespace

OuterAllReduce::OuterAllReduce(const ddl_transport& transport, const std::vector<RingPosition>& dimensions, int tag)
    : dimensions_(dimensions),
      tag_(tag),
      sends_(transport, memory_, WireMessages::kSends),
      receives_(transport, memory_, WireMessages::kReceives) {
  for (const RingPosition& ring : dimensions_) num_parts_ *= static_cast<uint64_t>(ring.size);
  own_ = {0, num_parts_};
  std::vector<Range> before;  // the parts that each dimension divides among its ranks
  for (const RingPosition& ring : dimensions_) {
    before.push_back(own_);
    AddSteps(ring, own_, /*reduces=*/true);
    const uint64_t each = own_.size() / static_cast<uint64_t>(ring.size);
    own_.begin += static_cast<uint64_t>(ring.position) * each;
    own_.end = own_.begin + each;
  }
  for (size_t d = dimensions_.size(); d-- > 0;) AddSteps(dimensions_[d], before[d], /*reduces=*/false);
}

size_t OuterAllReduce::PartOf(const std::vector<int>& positions, const std::vector<int>& sizes) {
  size_t part = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    part = part * static_cast<size_t>(sizes[d]) + static_cast<size_t>(positions[d]);
  }
  return part;
}

void OuterAllReduce::AddSteps(const RingPosition& ring, const Range& parts, bool reduces) {
  const uint64_t each = parts.size() / static_cast<uint64_t>(ring.size);
  const auto chunk = [&](size_t number) {
    return Range{parts.begin + number * each, parts.begin + (number + 1) * each};
  };
  for (int s = 0; s < ring.size - 1; ++s) {
    const RingStep step =
        reduces ? ReduceScatterStep(ring.position, ring.size, s) : AllGatherStep(ring.position, ring.size, s);
    (reduces ? reduce_steps_of_box_ : gather_steps_of_box_)
        .push_back({&ring, chunk(step.send), chunk(step.receive), reduces});
  }
}

uint64_t OuterAllReduce::WireOffset(uint64_t part) const {
  if (!compressed()) return at_[part] * bytes_;
  return at_[part] * kRoundedBytes + (compression_ == DDL_COMPRESSION_FLOAT16 ? part * sizeof(float) : 0);
}

uint64_t OuterAllReduce::WireBytes(const Range& parts) const {
  return Elements(parts) == 0 ? 0 : WireOffset(parts.end) - WireOffset(parts.begin);
}

char* OuterAllReduce::Block(const std::vector<uint64_t>& parts, size_t element_bytes, ddl_compression compression) {
  bytes_ = element_bytes;
  compression_ = compression;
  at_.assign(1, 0);
  for (const uint64_t count : parts) at_.push_back(at_.back() + count);
  recv_scratch_bytes_ = 0;
  for (const Step& step : reduce_steps_of_box_) {
    recv_scratch_bytes_ = std::max(recv_scratch_bytes_, WireBytes(step.receive));
  }
  const uint64_t rounded_bytes = compressed() ? WireOffset(num_parts_) : 0;
  data_ = memory_.Reserve(at_.back() * bytes_ + rounded_bytes + 2 * recv_scratch_bytes_);
  rounded_ = data_ + at_.back() * bytes_;
  recv_scratch_ = rounded_ + rounded_bytes;
  return data_;
}

Status OuterAllReduce::Start(Halves halves, const Reduction& across, const Reduction* last, float* errors) {
  across_ = across;
  has_last_ = last != nullptr;
  if (has_last_) last_ = *last;
  errors_ = errors;
  steps_.clear();
  if (halves != Halves::kAllGather) steps_ = reduce_steps_of_box_;
  reduce_steps_ = steps_.size();
  if (halves != Halves::kReduceScatter) {
    steps_.insert(steps_.end(), gather_steps_of_box_.begin(), gather_steps_of_box_.end());
  }
  posted_ = received_ = sent_ = gathers_ = 0;
  if (errors_ != nullptr) {
    const void* sources[] = {data_, errors_};
    Reduce(DDL_FLOAT32, DDL_SUM, sources, 2, data_, at_.back(), 1.0, Store::kCached);
  }
  bool moved = false;
  return Progress(&moved);
}

// Receives are posted one step ahead, so that a buffer is ready when a message arrives. A receive that replaces data
// must not overtake the sends of that data, which all belong to the reduce-scatters.
bool OuterAllReduce::MayReceive(size_t step) const {
  if (step > received_ + 1) return false;
  return step < reduce_steps_ || (sent_ >= reduce_steps_ && sends_.size() <= gathers_);
}

Status OuterAllReduce::Progress(bool* moved) {
  // Empty messages are not sent, and both ends know which messages are empty.
  for (bool again = true; again && !done();) {
    again = false;
    while (posted_ < steps_.size() && MayReceive(posted_)) {
      const Step& step = steps_[posted_];
      if (const uint64_t bytes = WireBytes(step.receive); bytes > 0) {
        char* const to = step.reduces ? RecvScratch(posted_) : Wire(step.receive);
        DDL_RETURN_IF_ERROR(receives_.Start(step.ring->previous, tag_, to, bytes));
      }
      ++posted_;
    }
    // Step s sends what step s - 1 received.
    while (sent_ < steps_.size() && sent_ <= received_) {
      const Step& step = steps_[sent_];
      if (const uint64_t bytes = WireBytes(step.send); bytes > 0) {
        if (compressed() && step.reduces) Round(step.send, 1);
        DDL_RETURN_IF_ERROR(sends_.Start(step.ring->next, tag_, Wire(step.send), bytes));
        if (!step.reduces) ++gathers_;
      }
      ++sent_;
    }
    bool finished = true;
    while (finished && sends_.size() > 0) {
      DDL_RETURN_IF_ERROR(sends_.TakeFinished(&finished));
      again = again || finished;
    }
    if (received_ < posted_) {
      const Step& step = steps_[received_];
      finished = WireBytes(step.receive) == 0;
      if (!finished) DDL_RETURN_IF_ERROR(receives_.TakeFinished(&finished));
      if (finished) {
        Take(step, received_++);
        again = true;
      }
    }
    *moved = *moved || again;
  }
  return {};
}

void OuterAllReduce::Take(const Step& step, size_t number) {
  if (!step.reduces) {
    if (compressed()) Unpack(Wire(step.receive), step.receive, /*adds=*/false);
    return;
  }
  if (compressed()) {
    Unpack(RecvScratch(number), step.receive, /*adds=*/true);
  } else {
    char* const target = part(step.receive.begin);
    const void* sources[] = {RecvScratch(number), target};
    Reduce(across_.dtype, across_.op, sources, 2, target, Elements(step.receive), 1.0, Store::kCached);
  }
  if (number + 1 < reduce_steps_) return;
  if (has_last_) {
    const View sum(bytes_, part(own_.begin), Elements(own_));
    DivideLast(sum, sum, last_);
  }
  if (compressed()) {
    Round(own_, has_last_ ? static_cast<float>(last_.divisor) : 1);
    Unpack(Wire(own_), own_, /*adds=*/false);
  }
}

void OuterAllReduce::Round(const Range& parts, float unit) {
  const bool scaled = compression_ == DDL_COMPRESSION_FLOAT16;
  for (uint64_t p = parts.begin; p < parts.end; ++p) {
    const auto* const from = reinterpret_cast<const float*>(part(p));
    const uint64_t count = at_[p + 1] - at_[p];
    char* to = rounded_ + WireOffset(p);
    const float scale = scaled ? ScaleOf(LargestFinite(from, count)) : 1;
    if (scaled) {
      std::memcpy(to, &scale, sizeof scale);
      to += sizeof scale;
    }
    Narrow(scaled ? DDL_FLOAT16 : DDL_BFLOAT16, from, scale, to, unit, errors_ == nullptr ? nullptr : errors_ + at_[p],
           count);
  }
}

void OuterAllReduce::Unpack(const char* message, const Range& parts, bool adds) {
  const bool scaled = compression_ == DDL_COMPRESSION_FLOAT16;
  for (uint64_t p = parts.begin; p < parts.end; ++p) {
    if (at_[p] == at_[p + 1]) continue;  // if all parts are empty, there is no message
    const char* from = message + (WireOffset(p) - WireOffset(parts.begin));
    float scale = 1;
    if (scaled) {
      std::memcpy(&scale, from, sizeof scale);
      from += sizeof scale;
    }
    Widen(scaled ? DDL_FLOAT16 : DDL_BFLOAT16, from, 1 / scale, reinterpret_cast<float*>(part(p)), at_[p + 1] - at_[p],
          adds);
  }
}

void OuterAllReduce::Cancel() {
  sends_.Cancel();
  receives_.Cancel();
  received_ = steps_.size();
}

}  // namespace ddl
