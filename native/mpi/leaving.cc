// A rank may leave a communicator while messages to it are on their way (for example, another rank's farewell). If the
// communicator were freed at once, Open MPI would give its context to the next communicator and deliver the messages
// there. So each rank sends a last message to each other rank. When it has come, all earlier messages of that rank have
// come, because MPI keeps their order. The remaining messages are received and dropped, and the communicator is freed.
// MPI_Comm_free is collective, but local if nothing is under way ("it is anticipated that this operation will normally
// be implemented to be local", MPI 4.1, section 7.4.3), so ranks need not call it at the same time.
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

class Left {
 public:
  Left(MPI_Comm comm, bool clean) : comm_(comm), clean_(clean) {}

  // Returns whether there is nothing left to do.
  bool Advance() {
    if (!told_ && !Tell()) return true;
    int sent = 0;
    if (!Hear()) return true;
    const int code = MPI_Testall(static_cast<int>(sends_.size()), sends_.data(), &sent, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) return true;
    if (!sent || heard_ < size_ - 1) return false;
    // A message that a rank has not completely sent must not be received, because the rank may have given up its
    // memory.
    if (clean_ && Forget()) MPI_Comm_free(&comm_);
    return true;
  }

 private:
  bool Tell() {
    told_ = true;
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

  bool Hear() {
    while (heard_ < size_ - 1) {
      int found = 0;
      MPI_Status status;
      char word = 0;
      if (MPI_Iprobe(MPI_ANY_SOURCE, LastTag(), comm_, &found, &status) != MPI_SUCCESS) return false;
      if (!found) return true;
      if (MPI_Recv(&word, 1, MPI_BYTE, status.MPI_SOURCE, LastTag(), comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
      ++heard_;
      clean_ = clean_ && word == 1;
    }
    return true;
  }

  bool Forget() {
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
  bool told_ = false;
  char word_ = 0;
  int size_ = 0;
  int heard_ = 0;
  std::vector<MPI_Request> sends_;
};

std::mutex mutex;
// MPI reads from these entries until their sends are done. So this is a list, which does not move them, and it is never
// destroyed.
std::list<Left>& All() {
  static auto* const all = new std::list<Left>;
  return *all;
}

}  // namespace

void Leave(MPI_Comm comm, bool clean) {
  const std::lock_guard<std::mutex> lock(mutex);
  All().emplace_back(comm, clean);
}

void FreeWhatAllHaveLeft() {
  const std::lock_guard<std::mutex> lock(mutex);
  All().remove_if([](Left& each) { return each.Advance(); });
}

}  // namespace ddl_mpi
