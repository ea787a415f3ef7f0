#include "shm/group_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/gather.h"
#include "shm/life_lock.h"
#include "shm/stale_shared_memory.h"

namespace ddl {
namespace {

// The data that ranks exchange while they attach.
struct Record {
  int32_t pid;
  int32_t fd;  // the leader's file descriptor; -1: none
  int32_t failed;
  uint64_t inode;  // inode of the file of `fd` or `name`
  uint64_t device;
  char name[64];
};

Record OwnRecord() {
  Record record{};
  record.pid = static_cast<int32_t>(getpid());
  record.fd = -1;
  return record;
}

Status OsError(const std::string& what) { return {DDL_INTERNAL, what + ": " + std::strerror(errno)}; }

bool AnyFailed(const std::vector<Record>& records) {
  for (const Record& record : records) {
    if (record.failed != 0) return true;
  }
  return false;
}

int MakeMemfd(size_t bytes) {
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "keras_ddl", 1u /* MFD_CLOEXEC */));
  if (fd < 0) return -1;
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

// Records in `record` which file `fd` is. Returns whether it is known.
bool Identify(int fd, Record* record) {
  struct stat status{};
  if (fstat(fd, &status) != 0) return false;
  record->inode = status.st_ino;
  record->device = status.st_dev;
  return true;
}

// Returns `fd` if it is the leader's file. Otherwise closes it and returns -1, because another user may have replaced
// the file.
int OnlyIfOf(const Record& leader, int fd) {
  struct stat status{};
  if (fd < 0) return -1;
  if (fstat(fd, &status) == 0 && status.st_ino == leader.inode && status.st_dev == leader.device &&
      status.st_uid == geteuid() && S_ISREG(status.st_mode)) {
    return fd;
  }
  close(fd);
  errno = EPERM;
  return -1;
}

// Opens the leader's memfd. Returns -1 if its number is another file, as in another process-id namespace.
int OpenMemfdOf(const Record& leader) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", static_cast<int>(leader.pid), static_cast<int>(leader.fd));
  return OnlyIfOf(leader, open(path, O_RDWR | O_CLOEXEC));
}

}  // namespace

Status GroupMemory::Map(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return OsError("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  base_ = base;
  mapped_bytes_ = bytes;
  return {};
}

void GroupMemory::Unmap() {
  if (mapped_bytes_ != 0) munmap(base_, mapped_bytes_);
  base_ = nullptr;
  mapped_bytes_ = 0;
}

// Attaches to the leader's memfd, which the other ranks open through /proc.
Status GroupMemory::AttachMemfd(const ddl_transport& transport, int leader, size_t bytes, bool* everywhere) {
  Record mine = OwnRecord();
  int own_fd = -1;
  if (transport.rank == leader) {
    own_fd = MakeMemfd(bytes);
    if (own_fd >= 0 && Identify(own_fd, &mine) && Map(own_fd, bytes).ok()) mine.fd = own_fd;
  }
  std::vector<Record> records;
  Status status = Gather(transport, mine, &records);
  if (status.ok()) {
    if (transport.rank != leader) {
      const Record& lead = records[static_cast<size_t>(leader)];
      const int fd = lead.fd >= 0 ? OpenMemfdOf(lead) : -1;
      if (fd >= 0 && !Map(fd, bytes).ok()) Unmap();
      if (fd >= 0) close(fd);
    }
    mine.failed = base_ == nullptr ? 1 : 0;
    status = Gather(transport, mine, &records);
  }
  if (own_fd >= 0) close(own_fd);
  *everywhere = !AnyFailed(records);
  kind_ = members_.size() > 1 ? "memfd" : "private";
  return status;
}

// Attaches to a named object, which is unlinked once all ranks have attached.
Status GroupMemory::AttachNamed(const ddl_transport& transport, int leader, size_t bytes) {
  Record mine = OwnRecord();
  std::vector<Record> records;
  Status reason;
  if (transport.rank == leader) {
    RemoveStaleSharedMemory();
    const std::string name = NewSharedMemoryName();
    const int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) std::memcpy(mine.name, name.c_str(), name.size() + 1);
    // If /dev/shm is too small, posix_fallocate fails now; after ftruncate, an access would raise SIGBUS later.
    if (fd < 0 || !Identify(fd, &mine) || posix_fallocate(fd, 0, static_cast<off_t>(bytes)) != 0 ||
        !Map(fd, bytes).ok()) {
      reason = OsError("shared memory of " + std::to_string(bytes) + " bytes in /dev/shm");
      mine.failed = 1;
    }
    if (fd >= 0) close(fd);
  }
  Status status = Gather(transport, mine, &records);
  if (status.ok() && transport.rank != leader && !AnyFailed(records)) {
    const Record& lead = records[static_cast<size_t>(leader)];
    const int fd = OnlyIfOf(lead, shm_open(lead.name, O_RDWR | O_CLOEXEC, 0600));
    if (fd < 0 || !Map(fd, bytes).ok()) {
      reason = OsError("attaching to the shared memory of rank " + std::to_string(leader));
      mine.failed = 1;
    }
    if (fd >= 0) close(fd);
  }
  if (status.ok()) status = Gather(transport, mine, &records);
  if (mine.name[0] != '\0') shm_unlink(mine.name);
  DDL_RETURN_IF_ERROR(status);
  kind_ = "shm_open";
  for (int r = 0; r < transport.size; ++r) {
    if (records[static_cast<size_t>(r)].failed == 0) continue;
    return {DDL_INTERNAL, "rank " + std::to_string(r) + " could not share memory with the ranks of its host" +
                              (reason.ok() ? "" : " (" + reason.message() + ")") +
                              ". Ranks of one host must run as one user, and /dev/shm needs " + std::to_string(bytes) +
                              " bytes; or keep them apart with mode 'x:1x" + std::to_string(transport.size) + "'."};
  }
  return {};
}

Status GroupMemory::Create(const ddl_transport& transport, const std::vector<int>& group, size_t slot_bytes,
                           std::unique_ptr<GroupMemory>* out) {
  std::unique_ptr<GroupMemory> memory(new GroupMemory());
  const int leader = group[static_cast<size_t>(transport.rank)];
  for (int r = 0; r < transport.size; ++r) {
    if (group[static_cast<size_t>(r)] != leader) continue;
    if (r == transport.rank) memory->local_rank_ = static_cast<int>(memory->members_.size());
    memory->members_.push_back(r);
  }
  const size_t members = memory->members_.size();
  const size_t page = 4096;
  const size_t blocks_bytes = (members * sizeof(RankBlock) + page - 1) / page * page;
  // A group of one needs no slots, because nobody would read them.
  const size_t bytes = blocks_bytes + (members > 1 ? members * kSlots * slot_bytes : 0);
  if (transport.share != nullptr) {
    memory->base_ = transport.share(transport.self, leader, bytes);
    memory->kind_ = "threads";
    if (memory->base_ == nullptr) return {DDL_INTERNAL, "the transport shares no memory"};
  } else {
    bool everywhere = false;
    DDL_RETURN_IF_ERROR(memory->AttachMemfd(transport, leader, bytes, &everywhere));
    // If any rank failed, all ranks use the named object instead.
    if (!everywhere) {
      memory->Unmap();
      DDL_RETURN_IF_ERROR(memory->AttachNamed(transport, leader, bytes));
    }
  }
  memory->blocks_ = static_cast<RankBlock*>(memory->base_);
  memory->slots_ = static_cast<char*>(memory->base_) + blocks_bytes;
  memory->slot_bytes_ = slot_bytes;
  LifeLock::Prepare(memory->own());
  memory->own().pid.store(static_cast<int32_t>(getpid()), std::memory_order_release);
  *out = std::move(memory);
  return {};
}

GroupMemory::~GroupMemory() { Unmap(); }

}  // namespace ddl
