#ifndef FERRY_ONE_SIDED_CORE_HPP
#define FERRY_ONE_SIDED_CORE_HPP

/// State of a OneSided besides its backend: the taken blocks of the heap, and its teams. Every rank allocates in the
/// same steps, so a block has the same offset on all ranks.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/forks.hpp"
#include "core/log.hpp"
#include "node/page_heap.hpp"
#include "one_sided/backend.hpp"

namespace ferry::one_sided {

/// Ranges of the heap that blocks occupy. Changed by collective calls; any thread may read at any time.
class Blocks {
 public:
  explicit Blocks(std::size_t heap_bytes);

  /// Offset of a new block; null if no free range is large enough.
  std::optional<std::size_t> take(std::size_t num_bytes);
  /// Bytes of the block at `offset`, rounded up to pages; 0 if no block begins there.
  std::size_t size_of(std::size_t offset) const;
  void give(std::size_t offset);
  std::size_t largest_free_bytes() const { return heap_.largest_free_bytes(); }

  /// True if [offset, + num_bytes) is inside one block.
  bool contains(std::size_t offset, std::size_t num_bytes) const {
    const std::size_t page = page_at(offset);
    if (page == kNeverTaken || page == kFreed) return false;
    const std::size_t end = page - kFirstEnd;
    return offset <= end && num_bytes <= end - offset;
  }
  /// True if a block that contained `offset` was freed, and no block contains it now.
  bool was_freed(std::size_t offset) const { return page_at(offset) == kFreed; }

 private:
  /// States of a page that is in no block; larger values: kFirstEnd + the end of its block.
  static constexpr std::size_t kNeverTaken = 0;
  static constexpr std::size_t kFreed = 1;
  static constexpr std::size_t kFirstEnd = 2;

  std::size_t page_at(std::size_t offset) const {
    return offset < heap_bytes_ ? pages_[offset / node::kPageBytes].load(std::memory_order_relaxed) : kNeverTaken;
  }
  void mark(std::size_t offset, std::size_t num_bytes, std::size_t state);

  std::size_t heap_bytes_;
  node::PageHeap heap_;
  std::map<std::size_t, std::size_t> taken_;  // offset -> requested bytes
  std::vector<std::atomic<std::size_t>> pages_;
};

Status check_op(std::string_view operation, SignalOp op);

struct Core {
  Core(const Topology& topology_in, std::unique_ptr<Backend> backend_in, std::int64_t timeout_ns_in);

  /// Offset of a range of symmetric memory that the caller passed, or an error that describes the fault.
  Result<std::size_t> find(std::string_view operation, std::string_view what, const void* data,
                           std::size_t num_bytes) const;
  /// `word`: of 4 or 8 bytes.
  Result<std::size_t> find_word(std::string_view operation, const void* word, std::size_t word_bytes) const;
  Result<std::size_t> find_word(std::string_view operation, const std::uint64_t* word) const {
    return find_word(operation, word, sizeof(*word));
  }
  Status check_usable(std::string_view operation, Stream stream) const;
  Status check_rank(std::string_view operation, int rank) const;
  /// Both.
  Status check_call(std::string_view operation, int rank, Stream stream) const;
  Status check_team(std::string_view operation, const TeamState* team) const;
  /// Logs an error that a public call returns.
  Status noted(Status status) const {
    if (!status.ok()) errors.note(status);
    return status;
  }
  template <typename T>
  Result<T> noted(Result<T> result) const {
    if (!result.ok()) errors.note(result.status());
    return result;
  }
  std::shared_ptr<const TeamState> make_team(std::vector<int> ranks, std::vector<int> slots) const;
  /// Slot that this rank shows in a split of the team: the same until the split is over; kMaxTeams if none is left.
  int reserve_slot(const TeamState& parent);
  /// The split has made a team in the slot.
  void use_slot(const TeamState& parent) { reserved_slots[static_cast<std::size_t>(parent.my_slot())] = kNoSlot; }

  const Topology topology;
  const std::int64_t timeout_ns;
  const std::unique_ptr<Backend> backend;
  std::byte* const heap;
  Blocks blocks;
  std::shared_ptr<const TeamState> world;
  std::shared_ptr<const TeamState> node;
  std::shared_ptr<const TeamState> rail;
  static constexpr int kNoSlot = -1;
  int next_slot = 0;
  std::array<int, kMaxTeams> reserved_slots;  // by slot of the team that is being split
  std::atomic<bool> destroyed{false};
  mutable ErrorLog errors{{topology.rank, topology.num_ranks}};
  const int num_forks = ferry::num_forks();
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_CORE_HPP
