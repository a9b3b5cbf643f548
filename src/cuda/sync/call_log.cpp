#include "cuda/sync/call_log.hpp"

#include <algorithm>
#include <new>

namespace ferry::cuda {

Result<CallLog> CallLog::create(node::Peers& peers, std::int64_t last_number) {
  Result<std::byte*> data = peers.arena().take(sizeof(Ring));
  if (!data.ok()) return data.status();
  new (*data) Ring();
  return CallLog(peers, static_cast<std::size_t>(*data - peers.arena().mapping()->base()), last_number);
}

CallLog::Ring& CallLog::ring(int rank) const {
  return *reinterpret_cast<Ring*>(peers_->peer(rank).arena->base() + offset_);
}

std::int64_t CallLog::append(const CallRecord& record) {
  const std::int64_t number = ++last_number_;
  Slot& slot = ring(peers_->rank()).slots[static_cast<std::size_t>(number) % kNumSlots];
  slot.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.record.assign(record);
  slot.number.store(number, std::memory_order_release);
  return number;
}

bool CallLog::copy(int rank, std::int64_t number, CallRecord* record) const {
  if (number <= 0) return false;
  const Slot& slot = ring(rank).slots[static_cast<std::size_t>(number) % kNumSlots];
  if (slot.number.load(std::memory_order_acquire) != number) return false;
  record->assign(slot.record);
  std::atomic_thread_fence(std::memory_order_acquire);
  return slot.number.load(std::memory_order_relaxed) == number;
}

std::optional<CallRecord> CallLog::find(int rank, std::int64_t number) const {
  std::optional<CallRecord> record(std::in_place);
  if (!copy(rank, number, &*record)) record.reset();
  return record;
}

std::int64_t CallLog::last_number_of(int rank) const {
  std::int64_t last = 0;
  for (const Slot& slot : ring(rank).slots) last = std::max(last, slot.number.load(std::memory_order_relaxed));
  return last;
}

std::optional<CallLog::Difference> CallLog::find_difference(int peer) const {
  const int rank = peers_->rank();
  const std::int64_t last = std::min(last_number_of(rank), last_number_of(peer));
  const auto num_slots = static_cast<std::int64_t>(kNumSlots);
  for (std::int64_t number = std::max<std::int64_t>(1, last - num_slots + 1); number <= last; ++number) {
    const std::optional<CallRecord> mine = find(rank, number);
    const std::optional<CallRecord> theirs = find(peer, number);
    if (mine && theirs && mine->operation != theirs->operation) return {{rank, mine->operation, theirs->operation}};
  }
  return std::nullopt;
}

std::uint64_t agreement_word(const CallRecord& record) {
  if (record.code != ErrorCode::kOk) return 0;
  // FNV-1a (Fowler, Noll, Vo; 64-bit offset basis and prime) over whole words, in kNumLanes lanes, then over their
  // results: a product waits for the one before it in its lane, and the call for the last.
  constexpr std::uint64_t kBasis = 14695981039346656037ULL;
  constexpr std::size_t kNumLanes = 4;
  const auto mix = [](std::uint64_t& hash, std::uint64_t word) {
    hash ^= word;
    hash *= 1099511628211ULL;
    hash ^= hash >> 32;
  };
  std::array<std::uint64_t, kNumLanes> lanes;
  for (std::size_t lane = 0; lane < kNumLanes; ++lane) lanes[lane] = kBasis + lane;
  for (std::size_t i = 0; i < record.fields.size(); ++i) {
    mix(lanes[i % kNumLanes], static_cast<std::uint64_t>(record.fields[i]));
  }
  std::uint64_t hash = kBasis;
  mix(hash, static_cast<std::uint64_t>(record.operation) + 1);
  for (const std::uint64_t lane : lanes) mix(hash, lane);
  return hash == 0 ? 1 : hash;
}

}  // namespace ferry::cuda
