/// Rings in memory given from outside, which kernels use between the hosts' exchanges, and separate rings beside those
/// of the hosts, as in GPU memory. A thread stands in for the kernels, and host memory for GPU memory.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "call/exchange.hpp"
#include "node/futex.hpp"
#include "support/loopback_faults.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr rail::RingShape kShape{.num_chunks = 3, .chunk_bytes = 1024};
constexpr std::size_t kBytes = 2048;  // three chunks and more

using Word = std::atomic_ref<std::uint64_t>;

/// A rank of two nodes of one rank each.
class RingRank {
 public:
  explicit RingRank(RankContext& context, bool apart = false) : bootstrap_(context.bootstrap()) {
    BackendContext backend;
    backend.bootstrap = bootstrap_.get();
    backend.topology = {context.rank(), 2, 1};
    backend.options.arena_bytes = std::size_t{1} << 20;
    backend.options.timeout_ns = 20 * kNsPerSecond;
    backend.options.transport = "loopback";
    const std::size_t num_bytes = apart ? rail::Rails::rings_bytes(backend.topology, kShape)
                                        : rail::Rails::memory_bytes(backend.topology, kShape);
    memory_.resize(num_bytes / sizeof(Line) + 1);
    call::KernelRings rings{.shape = kShape, .memory = {memory_.data()->bytes, num_bytes}, .words = words_.get()};
    rings.in_gpu = apart;
    const call::KernelRingsSource source{.make = [&rings](bool /*in_gpu*/) { return rings; }};
    sync_ = std::move(call::CallSync::create(backend, &source)).value();
  }

  /// Sends the peer `value`, repeated, as the hosts do. Returns true if all received bytes are `expected`.
  bool exchange(std::uint8_t value, std::uint8_t expected) {
    const std::vector<std::byte> mine(kBytes, std::byte{value});
    std::vector<std::byte> theirs(kBytes);
    std::vector<std::span<const std::byte>> out(2);
    std::vector<std::span<std::byte>> in(2);
    const auto peer = static_cast<std::size_t>(this->peer());
    out[peer] = mine;
    in[peer] = theirs;
    throw_if_error(call::exchange_bytes(*sync_, out, in, "to send its bytes"));
    return theirs == std::vector<std::byte>(kBytes, std::byte{expected});
  }

  /// Sends two chunks and receives two, the later ones first, as blocks of a kernel may, without waking any thread.
  bool exchange_as_kernel(std::uint8_t value, std::uint8_t expected) {
    constexpr std::uint64_t kNumSent = 2;
    sync_->rails().keep_polling(true);
    const rail::Rails::Chunks chunks = sync_->rails().chunks();
    net::RingWords& words = words_[static_cast<std::size_t>(peer())];
    const auto offset_of = [](std::uint64_t number) { return number % kShape.num_chunks * kShape.chunk_bytes; };
    const std::int64_t deadline_ns = node::monotonic_ns() + 20 * kNsPerSecond;
    while (Word(words.credits).load(std::memory_order_acquire) + kShape.num_chunks < words.num_filled + kNumSent) {
      if (node::monotonic_ns() > deadline_ns) return false;
    }
    for (std::uint64_t number = words.num_filled + kNumSent; number-- > words.num_filled;) {
      std::memset(chunks.out + offset_of(number), value + static_cast<int>(number % 2), kShape.chunk_bytes);
      Word(words.filled[number % kShape.num_chunks])
          .store(net::filled_word(number, kShape.chunk_bytes), std::memory_order_release);
    }
    words.num_filled += kNumSent;
    while (Word(words.arrived).load(std::memory_order_acquire) < words.num_used + kNumSent) {
      if (node::monotonic_ns() > deadline_ns) return false;
    }
    bool equal = true;
    for (std::uint64_t number = words.num_used + kNumSent; number-- > words.num_used;) {
      const std::byte* const chunk = chunks.in + offset_of(number);
      const auto wanted = static_cast<std::byte>(expected + number % 2);
      equal = equal && chunk[0] == wanted && chunk[kShape.chunk_bytes - 1] == wanted;
      Word(words.used[number % kShape.num_chunks]).store(number + 1, std::memory_order_release);
    }
    words.num_used += kNumSent;
    return equal;
  }

  /// Sends a chunk as a kernel, then leaves as a rank that destroys its group.
  void send_and_leave() {
    net::RingWords& words = words_[static_cast<std::size_t>(peer())];
    Word(words.filled[0]).store(net::filled_word(0, kShape.chunk_bytes), std::memory_order_release);
    sync_->rails().leave();
  }

  /// Waits until the peer has left. Returns true if the chunk that it sent before is here by then.
  bool has_chunk_of_leaver() {
    const std::int64_t deadline_ns = node::monotonic_ns() + 20 * kNsPerSecond;
    while (sync_->rails().presence(peer()).ok()) {
      if (node::monotonic_ns() > deadline_ns) return false;
    }
    return Word(words_[static_cast<std::size_t>(peer())].arrived).load(std::memory_order_acquire) == 1;
  }

  call::CallSync& sync() { return *sync_; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  int peer() const { return 1 - sync_->rank(); }

  std::shared_ptr<Bootstrap> bootstrap_;
  std::vector<Line> memory_;
  std::unique_ptr<net::RingWords[]> words_ = std::make_unique<net::RingWords[]>(2);
  std::unique_ptr<call::CallSync> sync_;
};

void take_turns(RankContext& context, RingRank& rank) {
  const auto mine = static_cast<std::uint8_t>(10 * context.rank());
  const auto theirs = static_cast<std::uint8_t>(10 - mine);
  for (std::uint8_t round = 0; round < 5; ++round) {
    const auto value = static_cast<std::uint8_t>(mine + round);
    const auto expected = static_cast<std::uint8_t>(theirs + round);
    context.expect(rank.exchange(value, expected), "bytes exchanged by hosts");
    context.expect(rank.exchange_as_kernel(value, expected), "bytes exchanged by kernels");
  }
}

TEST(KernelRings, HostsAndKernelsTakeTurns) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = 2}, [](RankContext& context) {
    RingRank rank(context);
    context.expect(!rank.sync().rails().has_gpu_rings(), "one set of rings for both");
    take_turns(context, rank);
    throw_if_error(context.bootstrap()->all_gather({}, 20 * kNsPerSecond).status());
  });
}

TEST(KernelRings, ApartFromThoseOfTheHosts) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = 2}, [](RankContext& context) {
    RingRank rank(context, true);
    context.expect(rank.sync().rails().has_gpu_rings(), "rings apart");
    context.expect(rank.sync().network_usage().ring_memory == "gpu", "ring memory is shown as gpu");
    const std::size_t gpu_bytes = rail::Rails::rings_bytes(rank.sync().topology(), kShape);
    const std::size_t host_bytes = rail::Rails::memory_bytes(rank.sync().topology(), rail::default_ring_shape(2));
    context.expect(rank.sync().rails().memory_bytes() == host_bytes + gpu_bytes, "bytes of both");
    take_turns(context, rank);
    throw_if_error(context.bootstrap()->all_gather({}, 20 * kNsPerSecond).status());
  });
}

/// A peer that has left has sent all that a kernel may still wait for, whatever overtakes what.
TEST(KernelRings, ChunksArriveBeforeTheirSenderHasLeft) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    net::LoopbackFaults faults;
    faults.scramble(seed);
    run_ranks({.kind = RankKind::kThreads, .num_ranks = 2}, [seed](RankContext& context) {
      RingRank rank(context, true);
      throw_if_error(context.bootstrap()->all_gather({}, 20 * kNsPerSecond).status());
      if (context.rank() == 1) rank.send_and_leave();
      if (context.rank() == 0)
        context.expect(rank.has_chunk_of_leaver(), "the chunk, with seed " + std::to_string(seed));
      throw_if_error(context.bootstrap()->all_gather({}, 20 * kNsPerSecond).status());
    });
  }
}

}  // namespace
}  // namespace ferry::test
