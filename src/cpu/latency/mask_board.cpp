#include "cpu/latency/mask_board.hpp"

#include "plan/to_size.hpp"

namespace ferry::cpu {

// Processes share these words.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);

Result<std::unique_ptr<MaskBoard>> MaskBoard::create(node::Peers& peers) {
  // The arena's memory is zero.
  Result<std::byte*> words = peers.arena().take(to_size(peers.num_ranks()) * sizeof(std::uint64_t));
  if (!words.ok()) return words.status();
  const auto offset = static_cast<std::size_t>(*words - peers.arena().mapping()->base());
  return std::unique_ptr<MaskBoard>(new MaskBoard(peers, offset));
}

std::size_t MaskBoard::size_bytes() const {
  return node::round_up_to_page(to_size(peers_->num_ranks()) * sizeof(std::uint64_t));
}

std::atomic<std::uint64_t>& MaskBoard::since(int owner, int rank) const {
  std::byte* const words = peers_->peer(owner).arena->base() + offset_;
  return reinterpret_cast<std::atomic<std::uint64_t>*>(words)[rank];
}

void MaskBoard::mask(int rank, std::uint64_t call) {
  if (!masks(rank)) since(peers_->rank(), rank).store(call, std::memory_order_release);
}

void MaskBoard::unmask(int rank) { since(peers_->rank(), rank).store(0, std::memory_order_release); }

bool MaskBoard::masks_this_rank(int rank, std::uint64_t call) const {
  // Orders earlier reads of the rank's memory before the read of the word.
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::uint64_t first = since(rank, peers_->rank()).load(std::memory_order_acquire);
  return first != 0 && first <= call;
}

}  // namespace ferry::cpu
