#include "net/outer_all_reduce.h"

#include <algorithm>

#include "kernels/float16_mean.h"
#include "kernels/kernels.h"

namespace ddl {
namespace {

// `range` cut into one chunk per position of the ring.
std::vector<Range> Chunks(const Range& range, int size) {
  std::vector<Range> chunks = SplitEvenly(range.size(), size);
  for (Range& chunk : chunks) chunk = {chunk.begin + range.begin, chunk.end + range.begin};
  return chunks;
}

}  // namespace

char* OuterAllReduce::Block(uint64_t count, ddl_dtype dtype) {
  count_ = count;
  dtype_ = dtype;
  bytes_ = DtypeSize(dtype);
  const auto ring = static_cast<uint64_t>(dimensions_.empty() ? 1 : dimensions_[0].size);
  recv_scratch_bytes_ = (count / ring + 1) * bytes_;
  data_ = memory_.Reserve(count * bytes_ + 2 * recv_scratch_bytes_);
  recv_scratch_ = data_ + count * bytes_;
  return data_;
}

Status OuterAllReduce::Start(const Reduction& across, const Reduction* last) {
  across_ = across;
  has_last_ = last != nullptr;
  if (has_last_) last_ = *last;
  steps_.clear();
  posted_ = received_ = sent_ = gathers_ = 0;
  own_ = {0, count_};
  std::vector<std::vector<Range>> chunks;  // of each dimension
  for (const RingPosition& ring : dimensions_) {
    chunks.push_back(Chunks(own_, ring.size));
    AddSteps(ring, chunks.back(), /*reduces=*/true);
    own_ = chunks.back()[static_cast<size_t>(ring.position)];
  }
  reduce_steps_ = steps_.size();
  for (size_t d = dimensions_.size(); d-- > 0;) AddSteps(dimensions_[d], chunks[d], /*reduces=*/false);
  bool moved = false;
  return Progress(&moved);
}

void OuterAllReduce::AddSteps(const RingPosition& ring, const std::vector<Range>& chunks, bool reduces) {
  for (int s = 0; s < ring.size - 1; ++s) {
    const RingStep step =
        reduces ? ReduceScatterStep(ring.position, ring.size, s) : AllGatherStep(ring.position, ring.size, s);
    steps_.push_back({&ring, chunks[step.send], chunks[step.receive], reduces});
  }
}

// One receive ahead, so that its buffer is ready when a message arrives. A receive that replaces data must not overtake
// the sends of that data, all of which belong to the reduce-scatters.
bool OuterAllReduce::MayReceive(size_t step) const {
  if (step > received_ + 1) return false;
  return step < reduce_steps_ || (sent_ >= reduce_steps_ && sends_.size() <= gathers_);
}

Status OuterAllReduce::Progress(bool* moved) {
  // An empty message is not sent; both ends know that.
  for (bool again = true; again && !done();) {
    again = false;
    while (posted_ < steps_.size() && MayReceive(posted_)) {
      const Step& step = steps_[posted_];
      if (step.receive.size() > 0) {
        char* const to = step.reduces ? RecvScratch(posted_) : data_ + step.receive.begin * bytes_;
        DDL_RETURN_IF_ERROR(receives_.Start(step.ring->previous, tag_, to, step.receive.size() * bytes_));
      }
      ++posted_;
    }
    // Step s sends what step s - 1 received.
    while (sent_ < steps_.size() && sent_ <= received_) {
      const Step& step = steps_[sent_];
      if (step.send.size() > 0) {
        DDL_RETURN_IF_ERROR(
            sends_.Start(step.ring->next, tag_, data_ + step.send.begin * bytes_, step.send.size() * bytes_));
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
      finished = step.receive.size() == 0;
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
  if (!step.reduces) return;
  char* const target = data_ + step.receive.begin * bytes_;
  const void* sources[] = {RecvScratch(number), target};
  Reduce(dtype_, across_.op, sources, 2, target, step.receive.size(), 1.0, Store::kCached);
  if (has_last_ && number + 1 == reduce_steps_) {
    const View sum(bytes_, data_ + own_.begin * bytes_, own_.size());
    DivideLast(sum, sum, last_);
  }
}

void OuterAllReduce::Cancel() {
  sends_.Cancel();
  receives_.Cancel();
  received_ = steps_.size();
}

}  // namespace ddl
