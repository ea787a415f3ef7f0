// Runs a test body on several ranks, each a thread with its own communicator.
#ifndef KERAS_DDL_TESTS_THREAD_GROUP_H_
#define KERAS_DDL_TESTS_THREAD_GROUP_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ddl.h"

namespace ddl_test {

struct RunOptions {
  uint64_t staging_bytes = 0;
  double warn_after_s = 0;
  double deadline_s = 30;  // a test that hangs should fail with a message
  double lost_after_s = 0;
  void (*warn)(void* user, const char* message) = nullptr;
  void* warn_user = nullptr;
  // The box of the groups, as in ddl_options.
  std::vector<int32_t> outer = {};
  // Ranks whose communicator is destroyed as soon as their body returns; the others wait for each other first.
  std::set<int> leave_early;
  // Gives the communicators lanes (ddl_add_lane).
  bool lane = false;
  // Changes the transport of a rank before it is used.
  std::function<void(ddl_transport&)> tweak;
  std::function<void(ddl_transport&)> tweak_lane;
};

// `group[r]`: the lowest rank that shares memory with rank r; its size is the number of ranks. Fails the test if
// a communicator cannot be created.
void RunRanks(const std::vector<int>& group, const std::function<void(ddl_comm*, int rank)>& body,
              const RunOptions& options = {});

// {0, 0, ...}, {0, 1, 2, ...}
std::vector<int> AllTogether(int size);
std::vector<int> AllApart(int size);

// The outcome of a request.
struct Outcome {
  int code = DDL_OK;
  std::string message;
  std::string name{};
  std::map<int, uint32_t> roles{};  // by the ranks that the failure concerns
};
// `failure`: NULL for success.
Outcome OutcomeOf(const ddl_failure* failure);

// A request under construction; the buffers are the caller's. Fields of ddl_request may be set directly.
class Call {
 public:
  Call(ddl_kind kind, std::string name);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Call& Dtype(ddl_dtype dtype);
  Call& Op(ddl_op op);
  Call& Root(int root);
  Call& Flags(uint32_t flags);
  Call& Detail(const char* detail);
  Call& Buffer(const void* in, void* out, uint64_t count);
  // Sets the location and stream of buffers added from then on.
  Call& On(ddl_location location, void* stream);
  Call& Rows(uint64_t rows, uint64_t row_count);
  Call& Splits(std::vector<int64_t> splits);

  ddl_request request{};  // `name` and `buffers` are set by Start and TryRun

  // Starts the request; Finish waits for it. A request that is not done after two minutes ends the process, because
  // the other ranks could not be joined.
  ddl_work* Start(ddl_comm* comm);
  static Outcome Finish(ddl_work* work);
  Outcome Run(ddl_comm* comm) { return Finish(Start(comm)); }
  // Returns not 0 if the calling thread ran it itself; see ddl_try_run.
  int TryRun(ddl_comm* comm, uint32_t patience_us);

 private:
  void Complete();

  std::string name_;
  std::vector<ddl_buffer> buffers_;
  ddl_location location_{};
  std::vector<int64_t> splits_;
};

}  // namespace ddl_test
#endif  // KERAS_DDL_TESTS_THREAD_GROUP_H_
