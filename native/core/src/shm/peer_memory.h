// PeerMemory: reads and writes the memory of the other ranks of a group in place (cross memory attach:
// process_vm_readv(2), process_vm_writev(2)). The kernel copies once where shared memory copies twice, and no cache
// line bounces between two cores that both write it.
//
// The kernel allows this if one process may trace the other: ranks of one user in one process-id namespace, unless a
// container or a security module forbids it. (Yama does if its ptrace_scope is not 0, because no rank is an ancestor of
// another, and none opts in.) So Probe tests it when the group is created, with a secret word that identifies the
// process. If any rank cannot reach another, the group does not use it.
//
// A rank that gives up during a collective must stop others from writing into its buffers: RevokeAccess.
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

  // Tests whether the ranks of each group can reach each other, and sets GroupMemory::reachable. `wanted` must be true
  // on all ranks; otherwise no memory counts as reachable. COLLECTIVE over all ranks of the transport.
  static Status Probe(const ddl_transport& transport, bool wanted, GroupMemory& memory);

  // Read copies from `remote`, addresses in the process of `local_rank`, to `local`; Write copies the other way. Both
  // lists describe the same number of bytes, and are modified. REQUIRES: reachable. Cost: one system call for up to
  // 1,024 pieces.
  Status Read(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const;
  Status Write(int local_rank, std::vector<iovec>& local, std::vector<iovec>& remote) const;

  // Whether the other ranks' system calls can access these bytes of this process. They may not if a driver has mapped
  // the memory. Modifies the list. Cost: as Read.
  static bool Accessible(std::vector<iovec>& bytes);

  // After a failure: returns when no other rank writes, or will write, into this process's memory. A write takes
  // microseconds, or longer if its process does not get a core. RevokeAccess does not wait for dead processes, nor for
  // stopped ones, whose write is complete unless they were stopped between two instructions.
  void RevokeAccess() const;

 private:
  Status AccessFailed(const char* what, int local_rank, int error) const;
  Status PeerGaveUp(int local_rank) const;
  int GlobalRank(int local_rank) const;

  GroupMemory& memory_;
};

}  // namespace ddl
#endif  // KERAS_DDL_CORE_SHM_PEER_MEMORY_H_
