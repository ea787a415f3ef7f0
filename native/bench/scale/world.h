// Thousands of ranks in one process and one thread, with in-memory transports. Nothing waits, so all time is spent in
// the code itself. Each message carries the length of the longest chain of messages that led to it.
#ifndef KERAS_DDL_BENCH_SCALE_WORLD_H_
#define KERAS_DDL_BENCH_SCALE_WORLD_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/message.h"
#include "ddl.h"

namespace scale {

double CpuSeconds();
// Ends the program if `status` is an error.
void Must(const ddl::Status& status);

struct Operation;

// Messages that ranks have sent. `depth`: for each rank, the longest chain of messages that ends at it.
struct Network {
  struct Sent {
    int source;
    std::string bytes;
    uint64_t depth;
    uint64_t round;
  };
  struct Channel {
    std::deque<Sent> sent;
    std::deque<Operation*> receives;
  };
  explicit Network(int size)
      : channels(static_cast<size_t>(size)), depth(static_cast<size_t>(size)), at(depth), bytes_at(depth) {}

  std::vector<std::map<int, Channel>> channels;  // by destination and tag
  uint64_t round = 0;
  std::vector<uint64_t> depth;
  std::vector<uint64_t> at;  // messages from and to each rank
  std::vector<uint64_t> bytes_at;
  std::map<int, void*> blocks;

  void Clear() {
    std::fill(depth.begin(), depth.end(), 0);
    std::fill(at.begin(), at.end(), 0);
    std::fill(bytes_at.begin(), bytes_at.end(), 0);
  }
  uint64_t Longest() const { return *std::max_element(depth.begin(), depth.end()); }
};

struct End {
  Network* network;
  int rank;
};

ddl_transport TransportOf(End* end, int size);

struct World {
  World(int size_in, int per_host) : size(size_in), network(size_in) {
    for (int rank = 0; rank < size; ++rank) {
      group.push_back(rank - rank % per_host);
      ends.push_back({&network, rank});
    }
    for (int rank = 0; rank < size; ++rank) transports.push_back(TransportOf(&ends[static_cast<size_t>(rank)], size));
  }
  const int size;
  Network network;
  std::vector<int> group;
  std::deque<End> ends;
  std::vector<ddl_transport> transports;
};

// A rank's announcements: of the gradient buckets of a step, and of the numbers of rows with which a step begins.
std::vector<ddl::Announcement> SumsOf(int buckets, uint64_t step);
ddl::Announcement RowsOf(uint64_t step);

}  // namespace scale
#endif  // KERAS_DDL_BENCH_SCALE_WORLD_H_
