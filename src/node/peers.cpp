#include "node/peers.hpp"

#include <utility>

#include "node/futex.hpp"

namespace ferry::node {

Peers::Peers(int rank, int first_rank, Rendezvous rendezvous)
    : rank_(rank),
      first_rank_(first_rank),
      arena_(std::move(rendezvous.arena)),
      peers_(std::move(rendezvous.peers)),
      recorder_(arena_->mapping()->control().flight) {}

Peers::~Peers() { leave(); }

void Peers::leave() {
  control(rank_).left.store(1, std::memory_order_release);
  ring_all(true);
}

std::string_view Peers::loss_of(int rank) const {
  if (peer(rank).is_absent) return "is absent";
  if (control(rank).left.load(std::memory_order_acquire) != 0) return "has destroyed its group";
  return peer(rank).link != nullptr && peer(rank).link->gone() ? "has died" : "";
}

std::vector<int> Peers::ended_ranks() const {
  std::vector<int> ended;
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    // A rank that has left the group may live.
    const bool has_left = control(rank).left.load(std::memory_order_acquire) != 0;
    if (!has_left && peer(rank).link != nullptr && peer(rank).link->gone()) ended.push_back(rank);
  }
  return ended;
}

Location Peers::locate(const std::byte* data, std::int64_t num_rows, std::int64_t row_bytes,
                       std::int64_t stride_bytes) const {
  Location location{Location::Kind::kProcess, reinterpret_cast<std::int64_t>(data), num_rows, row_bytes, stride_bytes};
  const std::int64_t extent_bytes = num_rows == 0 ? 0 : (num_rows - 1) * stride_bytes + row_bytes;
  const ArenaMapping& mine = *arena_->mapping();
  if (data != nullptr && mine.contains(data, static_cast<std::size_t>(extent_bytes))) {
    location.kind = Location::Kind::kArena;
    location.value = data - mine.base();
  }
  return location;
}

bool Peers::reachable(const Location& location, int rank) const {
  return location.kind == Location::Kind::kArena || location.num_rows == 0 || peer(rank).same_process;
}

std::byte* Peers::resolve(const Location& location, int rank, const Extent& extent) const {
  if (location.num_rows < extent.num_rows || location.row_bytes < extent.row_bytes || location.stride_bytes < 0 ||
      location.stride_bytes % kRowGranuleBytes != 0 || location.value % kRowGranuleBytes != 0) {
    return nullptr;
  }
  if (location.kind == Location::Kind::kProcess) {
    return peer(rank).same_process ? reinterpret_cast<std::byte*>(location.value) : nullptr;
  }
  if (location.kind != Location::Kind::kArena) return nullptr;
  const ArenaMapping& theirs = *peer(rank).arena;
  const auto size_bytes = static_cast<std::int64_t>(theirs.size_bytes());
  // Subtractions and a division, none of which can overflow.
  const bool inside = location.value >= 0 && location.value <= size_bytes &&
                      extent.row_bytes <= size_bytes - location.value &&
                      (extent.num_rows <= 1 || location.stride_bytes == 0 ||
                       extent.num_rows - 1 <= (size_bytes - location.value - extent.row_bytes) / location.stride_bytes);
  return inside ? theirs.base() + location.value : nullptr;
}

void Peers::open(const CallDescriptor& descriptor) {
  ++call_;
  control(rank_).descriptors[call_ % 2] = descriptor;
  recorder_.reach(CallPhase::kEntered);
  post(Phase::kDescribed);
}

void Peers::post(Phase phase) {
  control(rank_).flag(phase).store(call_, std::memory_order_release);
  ring_all(false);
}

void Peers::ring(ControlBlock& theirs, bool force) {
  const std::uint32_t rings = theirs.doorbell.fetch_add(1, std::memory_order_seq_cst) + 1;
  const std::uint32_t wake_at = theirs.wake_at.load(std::memory_order_seq_cst);
  // Ring numbers wrap around; the signed difference orders any two that differ by less than 2^31.
  if (force || static_cast<std::int32_t>(rings - wake_at) >= 0) futex_wake_all(theirs.doorbell);
}

void Peers::ring_all(bool force) {
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    if (rank != rank_) ring(control(rank), force);
  }
}

void Peers::sleep(std::uint32_t rings, std::uint32_t num_rings, std::int64_t timeout_ns) {
  ControlBlock& mine = control(rank_);
  mine.wake_at.store(rings + num_rings, std::memory_order_seq_cst);
  futex_wait(mine.doorbell, rings, timeout_ns);
}

void Peers::report_error(const ErrorRecord& record) {
  ControlBlock& mine = control(rank_);
  mine.error = record;
  mine.error_set.store(1, std::memory_order_release);
  ring_all(true);
}

std::optional<ReportedError> Peers::error_reported_by(std::uint64_t last_call) const {
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    if (rank == rank_ || control(rank).error_set.load(std::memory_order_acquire) == 0) continue;
    if (control(rank).flag(Phase::kDescribed).load(std::memory_order_relaxed) > last_call) continue;
    return ReportedError{rank, control(rank).error};
  }
  return std::nullopt;
}

bool Peers::anyone_gave_up() const {
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    if (control(rank).error_set.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

}  // namespace ferry::node
