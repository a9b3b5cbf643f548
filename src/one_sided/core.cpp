#include "one_sided/core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace ferry::one_sided {

Blocks::Blocks(std::size_t heap_bytes)
    : heap_bytes_(heap_bytes), heap_(heap_bytes), pages_(heap_bytes / node::kPageBytes) {}

std::optional<std::size_t> Blocks::take(std::size_t num_bytes) {
  const std::optional<std::size_t> offset = heap_.take(std::max<std::size_t>(num_bytes, 1));
  if (!offset) return std::nullopt;
  taken_.emplace(*offset, num_bytes);
  mark(*offset, num_bytes, kFirstEnd + *offset + num_bytes);
  return offset;
}

std::size_t Blocks::size_of(std::size_t offset) const {
  const auto found = taken_.find(offset);
  return found == taken_.end() ? 0 : node::round_up_to_page(std::max<std::size_t>(found->second, 1));
}

void Blocks::give(std::size_t offset) {
  const auto found = taken_.find(offset);
  if (found == taken_.end()) return;
  mark(offset, found->second, kFreed);
  heap_.give(offset, std::max<std::size_t>(found->second, 1));
  taken_.erase(found);
}

void Blocks::mark(std::size_t offset, std::size_t num_bytes, std::size_t state) {
  const std::size_t num_pages = node::round_up_to_page(std::max<std::size_t>(num_bytes, 1)) / node::kPageBytes;
  for (std::size_t page = 0; page < num_pages; ++page) {
    pages_[offset / node::kPageBytes + page].store(state, std::memory_order_relaxed);
  }
}

Core::Core(const Topology& topology_in, std::unique_ptr<Backend> backend_in, std::int64_t timeout_ns_in)
    : topology(topology_in),
      timeout_ns(timeout_ns_in),
      backend(std::move(backend_in)),
      heap(backend->heap()),
      blocks(backend->heap_bytes()) {
  std::vector<int> all_ranks;
  std::vector<int> neighbours;
  std::vector<int> rail_peers;
  for (int rank = 0; rank < topology.num_ranks; ++rank) {
    all_ranks.push_back(rank);
    if (topology.node_of(rank) == topology.node_of(topology.rank)) neighbours.push_back(rank);
    if (topology.rail_of(rank) == topology.rail_of(topology.rank)) rail_peers.push_back(rank);
  }
  const auto add = [this](std::vector<int> ranks) {
    std::vector<int> slots(ranks.size(), next_slot++);
    return make_team(std::move(ranks), std::move(slots));
  };
  world = add(std::move(all_ranks));
  node = add(std::move(neighbours));
  rail = add(std::move(rail_peers));
  reserved_slots.fill(kNoSlot);
}

std::shared_ptr<const TeamState> Core::make_team(std::vector<int> ranks, std::vector<int> slots) const {
  auto state = std::make_shared<TeamState>();
  state->my_place = static_cast<int>(std::ranges::find(ranks, topology.rank) - ranks.begin());
  state->ranks = std::move(ranks);
  state->slots = std::move(slots);
  state->owner = this;
  return state;
}

int Core::reserve_slot(const TeamState& parent) {
  int& slot = reserved_slots[static_cast<std::size_t>(parent.my_slot())];
  if (slot == kNoSlot && next_slot < kMaxTeams) slot = next_slot++;
  return slot == kNoSlot ? kMaxTeams : slot;
}

Result<std::size_t> Core::find(std::string_view operation, std::string_view what, const void* data,
                               std::size_t num_bytes) const {
  // Compare as integers: the address may be anything.
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(heap);
  if (data != nullptr && blocks.contains(offset, num_bytes)) return offset;
  if (data != nullptr && blocks.contains(offset, 0)) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} bytes at {} ({}) reach past the end of their block of symmetric memory; check the "
                    "count, or allocate more",
                    operation, num_bytes, what, data));
  }
  if (data != nullptr && blocks.was_freed(offset)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is {}, in a block of symmetric memory that OneSided::free has freed; use a block "
                              "only until it is freed",
                              operation, what, data));
  }
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{}: {} is {}, which is in no block of symmetric memory (the heap of {} bytes at {}); pass an address "
          "inside a block that OneSided::allocate returned on this rank",
          operation, what, data, backend->heap_bytes(), static_cast<const void*>(heap)));
}

Result<std::size_t> Core::find_word(std::string_view operation, const void* word, std::size_t word_bytes) const {
  if (reinterpret_cast<std::uintptr_t>(word) % word_bytes != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the word is at {}, expected a multiple of {} bytes", operation, word, word_bytes));
  }
  return find(operation, "the word", word, word_bytes);
}

Status Core::check_usable(std::string_view operation, Stream stream) const {
  if (ferry::num_forks() != num_forks) return refuse_copy(operation);
  if (destroyed.load(std::memory_order_relaxed)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: this OneSided was destroyed; create a new one", operation));
  }
  if (stream.handle == nullptr || backend->takes_streams()) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the stream is {}, expected null: backend \"{}\" has no streams", operation,
                            stream.handle, backend->name()));
}

Status Core::check_rank(std::string_view operation, int rank) const {
  if (rank >= 0 && rank < topology.num_ranks) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the rank is {}, expected 0 to {}", operation, rank, topology.num_ranks - 1));
}

Status Core::check_call(std::string_view operation, int rank, Stream stream) const {
  if (Status status = check_usable(operation, stream); !status.ok()) return status;
  return check_rank(operation, rank);
}

Status check_op(std::string_view operation, SignalOp op) {
  if (op == SignalOp::kSet || op == SignalOp::kAdd) return {};
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: the operation is {}, expected SignalOp::kSet or kAdd",
                                                         operation, static_cast<std::int32_t>(op)));
}

Status Core::check_team(std::string_view operation, const TeamState* team) const {
  if (team != nullptr && team->owner == this) return {};
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: the team {}; pass a team of this OneSided", operation,
                                                         team == nullptr ? "is invalid (split gave this rank none)"
                                                                         : "belongs to another OneSided"));
}

}  // namespace ferry::one_sided
