// A rank may leave a communicator while messages to it are on their way (for example, another rank's farewell). If the
// communicator were freed at once, Open MPI would give its context to the next communicator and deliver the messages
// there. So each rank sends a last message to each other rank. When it has arrived, all earlier messages of that rank
// have arrived, because MPI keeps their order. The remaining messages are received and dropped, and the communicator is
// freed. MPI_Comm_free is collective, but local if no operation is pending ("it is anticipated that this operation will
// normally be implemented to be local", MPI 4.1, section 7.4.3), so ranks need not call it at the same time.
#include "leaving.h"

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

namespace ddl_mpi {
namespace {

// The largest tag that MPI has: no other message has it (ddl_mpi.h).
int LastTag() {
  int* bound = nullptr;
  int found = 0;
  const int code = MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &found);
  return code == MPI_SUCCESS && found ? *bound : 32767;
}

class LeftCommunicator {
 public:
  LeftCommunicator(MPI_Comm comm, bool clean) : comm_(comm), clean_(clean) {}

  // Returns whether there is nothing left to do.
  bool Advance() {
    if (!sent_farewells_ && !SendFarewells()) return true;
    int sent = 0;
    if (!ReceiveFarewells()) return true;
    const int code = MPI_Testall(static_cast<int>(sends_.size()), sends_.data(), &sent, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) return true;
    if (!sent || farewells_ < size_ - 1) return false;
    // A message that a rank has not completely sent must not be received, because the rank may have given up its
    // memory.
    if (clean_ && DropMessages()) MPI_Comm_free(&comm_);
    return true;
  }

 private:
  bool SendFarewells() {
    sent_farewells_ = true;
    int rank = 0;
    if (MPI_Comm_size(comm_, &size_) != MPI_SUCCESS || MPI_Comm_rank(comm_, &rank) != MPI_SUCCESS) return false;
    word_ = clean_ ? 1 : 0;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank) continue;
      sends_.push_back(MPI_REQUEST_NULL);
      if (MPI_Isend(&word_, 1, MPI_BYTE, peer, LastTag(), comm_, &sends_.back()) != MPI_SUCCESS) return false;
    }
    return true;
  }

  bool ReceiveFarewells() {
    while (farewells_ < size_ - 1) {
      int found = 0;
      MPI_Status status;
      char word = 0;
      if (MPI_Iprobe(MPI_ANY_SOURCE, LastTag(), comm_, &found, &status) != MPI_SUCCESS) return false;
      if (!found) return true;
      if (MPI_Recv(&word, 1, MPI_BYTE, status.MPI_SOURCE, LastTag(), comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
      ++farewells_;
      clean_ = clean_ && word == 1;
    }
    return true;
  }

  bool DropMessages() {
    std::vector<char> bytes;
    for (;;) {
      int found = 0;
      int length = 0;
      MPI_Status status;
      if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &found, &status) != MPI_SUCCESS) return false;
      if (!found) return true;
      if (MPI_Get_count(&status, MPI_BYTE, &length) != MPI_SUCCESS || length == MPI_UNDEFINED) return false;
      bytes.resize(static_cast<size_t>(std::max(length, 1)));
      if (MPI_Recv(bytes.data(), length, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm_, MPI_STATUS_IGNORE) !=
          MPI_SUCCESS)
        return false;
    }
  }

  MPI_Comm comm_;
  bool clean_;
  bool sent_farewells_ = false;
  char word_ = 0;
  int size_ = 0;
  int farewells_ = 0;
  std::vector<MPI_Request> sends_;
};

std::mutex mutex;
// MPI reads from the entries until their sends are done. So they are in a list, which does not move them and is never
// destroyed.
std::list<LeftCommunicator>& All() {
  static auto* const all = new std::list<LeftCommunicator>;
  return *all;
}

}  // namespace

void Leave(MPI_Comm comm, bool clean) {
  const std::lock_guard<std::mutex> lock(mutex);
  All().emplace_back(comm, clean);
}

void FreeLeftCommunicators() {
  const std::lock_guard<std::mutex> lock(mutex);
  All().remove_if([](LeftCommunicator& each) { return each.Advance(); });
}

}  // namespace ddl_mpi
