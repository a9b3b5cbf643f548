/// Finds the arenas that a process holds open, its own and its peers', and reads their flight records.

#include "ferry/recorded_calls.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/diagnosis.hpp"
#include "core/flight_snapshot.hpp"
#include "core/unique_fd.hpp"
#include "node/arena.hpp"
#include "node/futex.hpp"

namespace ferry::node {
namespace {

/// Beginning of the links in /proc/PID/fd to memory files of Arena::create.
constexpr std::string_view kLinkBeginning = "/memfd:ferry-arena";

using ArenaId = std::pair<dev_t, ino_t>;

struct CloseDirectory {
  void operator()(DIR* directory) const { closedir(directory); }
};
using Directory = std::unique_ptr<DIR, CloseDirectory>;

std::string descriptors_of(std::int64_t pid) { return fmt::format("/proc/{}/fd", pid); }

std::optional<std::int64_t> number_of(const char* name) {
  std::int64_t number = 0;
  const char* const end = name + std::strlen(name);
  const auto parsed = std::from_chars(name, end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

/// Control block of an arena, mapped for reading.
class MappedControl {
 public:
  explicit MappedControl(int fd) {
    struct stat info {};
    if (fstat(fd, &info) != 0 || info.st_size < static_cast<off_t>(kControlBytes)) return;
    // Without the seal its owner could end this process by truncating the file.
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return;
    void* const base = mmap(nullptr, kControlBytes, PROT_READ, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) control_ = static_cast<const ControlBlock*>(base);
  }
  ~MappedControl() {
    if (control_ != nullptr) munmap(const_cast<ControlBlock*>(control_), kControlBytes);
  }
  MappedControl(const MappedControl&) = delete;
  MappedControl& operator=(const MappedControl&) = delete;

  /// Null: no control block of this build.
  const ControlBlock* get() const {
    const bool known =
        control_ != nullptr && control_->magic == ControlBlock::kMagic && control_->size_bytes == sizeof(ControlBlock);
    return known ? control_ : nullptr;
  }

 private:
  const ControlBlock* control_ = nullptr;
};

class Collection {
 public:
  /// Reads the records of all arenas that the process holds open and that no process before it held. `only_known`: of
  /// groups that have a record already.
  Status add_process(std::int64_t pid, bool only_known) {
    const std::string folder = descriptors_of(pid);
    const Directory directory(opendir(folder.c_str()));
    if (directory == nullptr) return refused(pid, errno);
    while (const dirent* entry = readdir(directory.get())) {
      std::array<char, 64> link{};
      const std::string path = folder + "/" + entry->d_name;
      const ssize_t length = readlink(path.c_str(), link.data(), link.size());
      if (length < static_cast<ssize_t>(kLinkBeginning.size())) continue;
      if (!std::string_view(link.data(), static_cast<std::size_t>(length)).starts_with(kLinkBeginning)) continue;
      const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
      struct stat info {};
      if (!fd.valid() || fstat(fd.get(), &info) != 0) continue;
      if (!seen_.insert(ArenaId{info.st_dev, info.st_ino}).second) continue;
      add_arena(fd.get(), only_known);
    }
    return {};
  }

  /// Adds the ranks that other processes of this host have in groups of several nodes.
  void add_other_nodes() {
    if (std::ranges::none_of(groups_, [](const auto& one) { return is_incomplete(one.second); })) return;
    const Directory directory(opendir("/proc"));
    if (directory == nullptr) return;
    while (const dirent* entry = readdir(directory.get())) {
      // Processes of other users, and those that have ended meanwhile, have nothing to add.
      if (const auto pid = number_of(entry->d_name)) static_cast<void>(add_process(*pid, true));
    }
  }

  std::vector<RecordedGroup> take() && {
    std::vector<RecordedGroup> all;
    for (auto& [id, group] : groups_) {
      std::ranges::sort(group.ranks, {}, &RecordedRank::rank);
      group.now_ns = monotonic_ns();
      group.diagnosis = diagnose(group);
      all.push_back(std::move(group));
    }
    return all;
  }

 private:
  static Status refused(std::int64_t pid, int error) {
    if (error == ENOENT) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("recorded_calls: process {} does not exist; give the id of a process that lives, or of "
                                "a peer on the same host if it was killed",
                                pid));
    }
    return Status(ErrorCode::kSystem,
                  fmt::format("recorded_calls: looking into {} failed: {}; run this as the user of the process",
                              descriptors_of(pid), std::strerror(error)));
  }

  static bool is_incomplete(const RecordedGroup& group) {
    return group.ranks_per_node < group.num_ranks && std::ssize(group.ranks) < group.num_ranks;
  }

  void add_arena(int fd, bool only_known) {
    const MappedControl mapped(fd);
    if (mapped.get() == nullptr) return;
    const FlightRecord& record = mapped.get()->flight;
    const std::uint64_t group_id = record.group_id.load(std::memory_order_acquire);
    if (group_id == 0 || (only_known && !groups_.contains(group_id))) return;
    RecordedGroup& group = groups_[group_id];
    if (group.ranks.empty()) {
      group.id = fmt::format("{:016x}", group_id);
      group.num_ranks = record.num_ranks;
      group.ranks_per_node = record.ranks_per_node;
      group.timeout_ns = record.timeout_ns;
      group.wall_offset_ns = record.created_wall_ns - record.created_ns;
    }
    group.ranks.push_back(take_snapshot(record));
    group.ranks.back().has_left = mapped.get()->left.load(std::memory_order_acquire) != 0;
  }

  std::set<ArenaId> seen_;
  std::map<std::uint64_t, RecordedGroup> groups_;
};

}  // namespace
}  // namespace ferry::node

namespace ferry {

Result<std::vector<RecordedGroup>> recorded_calls(std::int64_t pid) {
  node::Collection collection;
  if (Status status = collection.add_process(pid, false); !status.ok()) return status;
  collection.add_other_nodes();
  return std::move(collection).take();
}

}  // namespace ferry
