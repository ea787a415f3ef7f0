// When the system has no more memory or threads, every rank gets an error, and the process never ends.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "several_groups.h"
#include "thread_group.h"
#include "thread_transport.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS() GTEST_SKIP() << "a sanitizer ends the process where memory or threads are short"
#else
#define SKIP_UNDER_SANITIZERS() static_cast<void>(0)
#endif

namespace ddl_test {
namespace {

// More memory than any machine has; never touched.
constexpr uint64_t kTooMany = uint64_t{1} << 58;

TEST(ShortageTest, NoMemoryForTheRowsOfAnAllGather) {
  SKIP_UNDER_SANITIZERS();
  for (const std::vector<int>& group : Groups()) {
    RunRanks(group, [](ddl_comm* comm, int rank) {
      float value = 1;
      const uint64_t rows = rank == 0 ? kTooMany : 1;
      const Outcome outcome = Call(DDL_ALL_GATHER, "rows").Rows(rows, 1).Buffer(&value, nullptr, rows).Run(comm);
      EXPECT_TRUE(outcome.code == DDL_INTERNAL || outcome.code == DDL_ABORTED) << outcome.message;
      EXPECT_TRUE(Contains(outcome.message, "out of memory for"));
    });
  }
}

TEST(ShortageTest, NoMemoryForTheRowsOfAnAllToAll) {
  SKIP_UNDER_SANITIZERS();
  for (const std::vector<int>& group : Groups()) {
    RunRanks(group, [](ddl_comm* comm, int rank) {
      float value = 1;
      // The error goes to every rank, because a rank with memory would begin to send.
      const std::vector<int64_t> splits(static_cast<size_t>(ddl_size(comm)), rank == 0 ? kTooMany / 8 : 0);
      const uint64_t rows = rank == 0 ? kTooMany / 8 * splits.size() : 0;
      Call call(DDL_ALL_TO_ALL, "rows");
      const Outcome outcome = call.Rows(rows, 1).Splits(splits).Buffer(&value, nullptr, rows).Run(comm);
      EXPECT_TRUE(outcome.code == DDL_INTERNAL || outcome.code == DDL_ABORTED) << outcome.message;
      EXPECT_TRUE(Contains(outcome.message, "out of memory for"));
    });
  }
}

TEST(ShortageTest, NoMemoryForTemporaryBuffersOfACollective) {
  SKIP_UNDER_SANITIZERS();
  for (const std::vector<int>& group : Groups()) {
    for (const uint32_t flags : {0u, DDL_FLAG_PLAIN_MPI}) {
      RunRanks(group, [&](ddl_comm* comm, int rank) {
        int8_t value = 1;
        Call call(DDL_ALL_REDUCE, "mean");
        call.Dtype(DDL_INT8).Op(DDL_MEAN).Flags(flags).Buffer(&value, &value, kTooMany * 16);
        // A collective that the calling thread may run itself fails in the same way.
        EXPECT_EQ(call.TryRun(comm, rank == 0 ? 0 : 20'000), 0);
        const Outcome outcome = call.Run(comm);
        EXPECT_TRUE(outcome.code == DDL_INTERNAL || outcome.code == DDL_ABORTED) << outcome.message;
        EXPECT_TRUE(Contains(outcome.message, "out of memory for"));
      });
    }
  }
}

// Runs `body`, which returns an error or "", in a process whose user may have `threads` more threads.
void WithThreads(int threads, const std::function<std::string()>& body) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    constexpr uid_t kNobodyElse = 54'321;
    const rlimit limit{static_cast<rlim_t>(1 + threads), static_cast<rlim_t>(1 + threads)};
    std::string wrong = "cannot become another user";
    if (setuid(kNobodyElse) == 0 && setrlimit(RLIMIT_NPROC, &limit) == 0) wrong = body();
    if (write(ends[1], wrong.data(), wrong.size()) < 0) _exit(1);
    _exit(0);
  }
  close(ends[1]);
  std::string wrong;
  char piece[256];
  for (ssize_t n = 0; (n = read(ends[0], piece, sizeof piece)) > 0;) wrong.append(piece, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(wrong, "");
}

TEST(ShortageTest, NoMoreThreads) {
  if (geteuid() != 0) GTEST_SKIP() << "needs the right to become another user (root)";
  SKIP_UNDER_SANITIZERS();
  WithThreads(0, [] {
    const int32_t leader = 0;
    ddl_options options{};
    options.abi_version = DDL_ABI_VERSION;
    options.group = &leader;
    char text[1024] = "";
    if (ddl_create(nullptr, &options, text, sizeof text) != nullptr) return std::string("a communicator");
    const std::string message = text;
    return Contains(message, "rank(s) 0") && Contains(message, "ulimit -u") ? "" : message;
  });
  // Only one of the two ranks can start its communication thread, so neither gets a communicator.
  WithThreads(3, [] {
    std::vector<ddl_transport> transports = MakeThreadTransports(2);
    std::string wrong;
    std::string messages[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const int32_t group[] = {0, 0};
        ddl_options options{};
        options.abi_version = DDL_ABI_VERSION;
        options.group = group;
        char text[1024] = "a communicator";
        ddl_comm* const comm = ddl_create(&transports[static_cast<size_t>(rank)], &options, text, sizeof text);
        if (comm != nullptr) ddl_destroy(comm);
        messages[rank] = text;
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& message : messages) {
      const bool one = Contains(message, "rank(s) 0 on") || Contains(message, "rank(s) 1 on");
      if (!one || !Contains(message, "ulimit -u")) wrong += message;
    }
    return wrong + (messages[0] == messages[1] ? "" : "different messages");
  });
}

}  // namespace
}  // namespace ddl_test
