// PeerMemory: the memory of the other ranks of a group, read and written where it lies (cross memory attach:
// process_vm_readv(2), process_vm_writev(2)). The kernel copies once where shared memory copies twice, and no line of
// memory wanders between the caches of two cores that both write it.
//
// The kernel allows it to whoever may trace the other process: ranks of one user in one process-id namespace, unless a
// container or a security module forbids it (Yama, unless its ptrace_scope is 0: ranks are no ancestors of each other,
// and none opens itself to others). So it is tried out when the group is made (Probe), with a word that only the right
// process can have, and where one rank can not reach another the group does without.
//
// A rank that gives up in the middle takes its buffers back while others may still write into them: Withdraw.
#ifndef KERAS_DDL_CORE_SHM_PEER_MEMORY_H_
#define KERAS_DDL_CORE_SHM_PEER_MEMORY_H_

#include <sys/uio.h>

#include <string>
#include <vector>

#include "base/status.h"
#include "shm/group_memory.h"

namespace ddl {

class PeerMemory {
 public:
  explicit PeerMemory(GroupMemory& memory) : memory_(memory) {}

  // Finds out whether the ranks of each group reach each other, for GroupMemory::reachable. `wanted`: equal on all
  // ranks; if not, none is reached. COLLECTIVE over all ranks of the transport.
  static Status Probe(const ddl_transport& transport, bool wanted, GroupMemory& memory);

  // Fills `local` from `remote`, addresses in the process of `local_rank`; Write: the other way. Both lists describe
  // equally many bytes, and are changed. REQUIRES: reachable. Cost: one system call for up to 1,024 pieces.
  Status Read(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const;
  Status Write(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const;

  // Whether the system calls reach single bytes of this process, as the others will: what a driver has mapped into it
  // may be closed to them. Changes the list. Cost: as Read.
  static bool Accessible(std::vector<iovec>& bytes);

  // After a failure: returns when no other rank writes into this process's memory any more, nor will. A write takes
  // microseconds, or as long as its process is not given a core. Not waited for: a process that is dead, or one that is
  // stopped, which has written already unless it was stopped between two instructions.
  void Withdraw() const;

 private:
  Status Refused(const char* what, int local_rank, int error) const;
  Status GaveUp(int local_rank) const;
  std::string RankOf(int local_rank) const;

  GroupMemory& memory_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_PEER_MEMORY_H_
