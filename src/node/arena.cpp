#include "node/arena.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/descriptors.hpp"

namespace ferry::node {
namespace {

Status system_error(std::string_view what, std::string_view hint) {
  return Status(ErrorCode::kSystem, fmt::format("arena: {} failed: {}; {}", what, std::strerror(errno), hint));
}

/// Options that set the size of an arena, for messages.
constexpr const char* kSizeOptions = "GroupOptions::arena_bytes (of a OneSided: heap_bytes)";

/// Most bytes per fallocate call. On some kernels a signal undoes a whole call, so a call must be short enough to
/// finish between two signals.
constexpr std::size_t kTakeStepBytes = std::size_t{16} << 20;

/// Allocates the pages of a range now, which turns "out of memory" into an error here instead of a signal at first
/// touch.
bool take_pages(int fd, std::size_t offset, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kTakeStepBytes);
    if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(step)) != 0) {
      if (errno == EINTR) continue;
      return false;
    }
    offset += step;
    bytes -= step;
  }
  return true;
}

/// Checks the limit on file sizes, above which the system ends the process (setrlimit(2), SIGXFSZ).
Status check_file_limit(std::size_t size_bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || size_bytes <= limit.rlim_cur)
    return {};
  return Status(ErrorCode::kSystem,
                fmt::format("arena: it is a memory file of {} bytes, but this process may make files of at most {}; "
                            "raise the limit of file sizes (ulimit -f) or lower {}",
                            size_bytes, limit.rlim_cur, kSizeOptions));
}

Result<std::byte*> map_shared(int fd, std::size_t size_bytes) {
  // Deliberately sparse: pages are charged when they are allocated, so the mapping must not be charged in advance.
  void* base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    return system_error(fmt::format("mapping {} bytes of address space", size_bytes),
                        fmt::format("lower {} or raise the address-space limit (ulimit -v)", kSizeOptions));
  }
  return static_cast<std::byte*>(base);
}

}  // namespace

ArenaMapping::~ArenaMapping() { munmap(base_, size_bytes_); }

bool ArenaMapping::contains(const void* data, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= base_ && begin <= base_ + size_bytes_ &&
         bytes <= static_cast<std::size_t>(base_ + size_bytes_ - begin);
}

Result<std::shared_ptr<ArenaMapping>> ArenaMapping::map_peer(UniqueFd fd) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(ErrorCode::kTransport,
                  "arena: a peer sent a file that is not sealed against shrinking; run the same build on every rank");
  }
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return system_error("fstat of a peer's arena", "this is a bug; please report it");
  const auto size_bytes = static_cast<std::size_t>(info.st_size);
  if (size_bytes < kControlBytes) {
    return Status(
        ErrorCode::kTransport,
        fmt::format("arena: a peer sent a file of {} bytes, expected at least {}; run the same build on every rank",
                    size_bytes, kControlBytes));
  }
  Result<std::byte*> base = map_shared(fd.get(), size_bytes);
  if (!base.ok()) return base.status();
  auto mapping = std::make_shared<ArenaMapping>(std::move(fd), *base, size_bytes);
  const ControlBlock& control = mapping->control();
  if (control.magic != ControlBlock::kMagic || control.size_bytes != sizeof(ControlBlock)) {
    return Status(
        ErrorCode::kTransport,
        fmt::format("arena: a peer's control block has magic {:#x} and {} bytes, expected {:#x} and {}; run the same "
                    "build on every rank",
                    control.magic, control.size_bytes, ControlBlock::kMagic, sizeof(ControlBlock)));
  }
  return mapping;
}

Arena::Arena(std::shared_ptr<ArenaMapping> mapping)
    : mapping_(std::move(mapping)), heap_(mapping_->size_bytes() - kControlBytes) {}

Result<std::shared_ptr<Arena>> Arena::create(std::size_t heap_bytes) {
  constexpr std::size_t kMaxHeapBytes = std::size_t{1} << 46;  // half of x86-64's user address space
  if (heap_bytes > kMaxHeapBytes) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("arena: arena_bytes is {}, expected at most {}", heap_bytes, kMaxHeapBytes));
  }
  const std::size_t size_bytes = kControlBytes + round_up_to_page(heap_bytes);
  UniqueFd fd(memfd_create("ferry-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    const int error = errno;
    return system_error("memfd_create", is_out_of_descriptors(error) ? describe_descriptor_limit(error, 1)
                                                                     : "the kernel must have memfd (Linux 3.17)");
  }
  if (Status status = check_file_limit(size_bytes); !status.ok()) return status;
  if (ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    return system_error(fmt::format("sizing an arena of {} bytes", size_bytes), fmt::format("lower {}", kSizeOptions));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return system_error("sealing", "the kernel must support file sealing (Linux 3.17)");
  }
  if (!take_pages(fd.get(), 0, kControlBytes)) {
    return system_error(fmt::format("allocating {} bytes", kControlBytes), "free some memory");
  }
  Result<std::byte*> base = map_shared(fd.get(), size_bytes);
  if (!base.ok()) return base.status();
  new (*base) ControlBlock();
  return std::make_shared<Arena>(std::make_shared<ArenaMapping>(std::move(fd), *base, size_bytes));
}

Result<Buffer> Arena::allocate(std::size_t bytes) {
  Result<std::byte*> data = take(bytes);
  if (!data.ok()) return data.status();
  auto owner = std::shared_ptr<void>(
      *data, [arena = shared_from_this(), bytes](void* block) { arena->give(static_cast<std::byte*>(block), bytes); });
  return Buffer(std::move(owner), *data, bytes);
}

Result<std::byte*> Arena::take(std::size_t bytes) {
  std::byte* const heap_base = mapping_->base() + kControlBytes;
  if (bytes == 0) return heap_base;
  std::byte* data = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const std::optional<std::size_t> taken = heap_.take(bytes);
    if (!taken) {
      return Status(
          ErrorCode::kCapacity,
          fmt::format("allocate: {} bytes do not fit: {} of the arena's {} are in use and the largest free range is "
                      "{}; raise GroupOptions::arena_bytes",
                      bytes, allocated_bytes_, mapping_->size_bytes() - kControlBytes, heap_.largest_free_bytes()));
    }
    data = heap_base + *taken;
    allocated_bytes_ += round_up_to_page(bytes);
  }
  const auto offset = static_cast<std::size_t>(data - mapping_->base());
  if (take_pages(mapping_->fd(), offset, round_up_to_page(bytes))) return data;
  Status status = system_error(fmt::format("allocating {} bytes", bytes), "free some memory or use smaller batches");
  give(data, bytes);
  return status;
}

void Arena::give(std::byte* data, std::size_t bytes) {
  if (num_forks() != num_forks_) return;  // the pages belong to the process that this one was forked from
  if (bytes == 0) return;
  // Returns the pages to the system at once; they read as zero for the next owner.
  fallocate(mapping_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, data - mapping_->base(),
            static_cast<off_t>(round_up_to_page(bytes)));
  const std::lock_guard lock(mutex_);
  heap_.give(static_cast<std::size_t>(data - mapping_->base()) - kControlBytes, bytes);
  allocated_bytes_ -= round_up_to_page(bytes);
}

std::size_t Arena::largest_free_bytes() const {
  const std::lock_guard lock(mutex_);
  return heap_.largest_free_bytes();
}

std::size_t Arena::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocated_bytes_;
}

}  // namespace ferry::node
