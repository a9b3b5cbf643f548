#ifndef FERRY_TESTS_EMULATOR_ONE_SIDED_RANKS_HPP
#define FERRY_TESTS_EMULATOR_ONE_SIDED_RANKS_HPP

/// Ranks with symmetric memory on emulated GPUs, and a network between their nodes that keeps only the promised order.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "emulator/emulator.hpp"
#include "ferry/device/world.hpp"
#include "one_sided/ring_source.hpp"

namespace ferry::emulator {

class OneSidedRanks {
 public:
  struct Options {
    int num_ranks = 2;
    int ranks_per_node = 2;
    std::uint64_t seed = 1;
    std::uint64_t num_slots = 4;
    std::uint64_t slot_bytes = 64;
    std::uint64_t heap_bytes = 8192;
    std::size_t max_held_bytes = one_sided::kMaxHeldBytes;
  };
  static constexpr std::uint64_t kTimeoutNs = 30'000'000'000;

  explicit OneSidedRanks(const Options& options);
  ~OneSidedRanks();

  int num_ranks() const { return options_.num_ranks; }
  device::World world(int rank);
  /// Team of all ranks. Its words are the last of the heap, at different places on each rank.
  device::TeamView team(int rank);
  std::byte* heap(int rank) { return one(rank).heap.data(); }
  /// Word `idx` of the rank's heap.
  std::uint64_t* word(int rank, int idx) { return reinterpret_cast<std::uint64_t*>(heap(rank)) + idx; }
  device::ErrorRecord& errors(int rank) { return one(rank).errors; }
  one_sided::RingSource& source(int rank) { return *one(rank).source; }

  cudaStream_t stream(int rank) const { return streams_[static_cast<std::size_t>(rank)]; }
  /// Queues a kernel of this rank.
  void launch(int rank, const GridShape& shape, std::function<void()> kernel);
  /// Makes the network lose this rank; hosts learn of it if `told`.
  void lose(int rank, bool told) {
    one(rank).is_lost = true;
    tells_losses_ = told;
  }
  /// Makes no data sent to this rank arrive until the stall is over.
  void stall(int rank, bool stalled) { one(rank).is_stalled = stalled; }
  /// Runs all queued work, and the network as long as needed.
  std::string run();

 private:
  struct Operation {
    one_sided::NetworkRequest request;
    std::vector<std::byte> bytes;  ///< bytes of a put whose source was copied
  };
  struct Rank {
    std::vector<std::byte> heap;
    std::vector<std::byte> staging;
    std::vector<std::byte*> peer_heaps;  ///< by index in the node
    std::vector<device::TeamMate> mates;
    std::vector<std::uint64_t> words;
    device::RequestCounts counts{};
    std::vector<device::RequestReply> replies;
    device::ErrorRecord errors{};
    device::KernelState state{};
    device::World world;
    std::uint64_t epoch = 0;
    std::unique_ptr<one_sided::RingSource> source;
    std::deque<Operation> under_way;
    std::set<int> fenced;  ///< peers to which no request is sent before the operations in progress have arrived
    bool is_lost = false;
    bool is_stalled = false;
  };
  Rank& one(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  int node_of(int rank) const { return rank / options_.ranks_per_node; }
  bool has_network() const { return options_.num_ranks > options_.ranks_per_node; }
  void make_source(int rank);
  static bool can_issue(Rank& from, int peer);
  bool take(Rank& from);
  bool move(Rank& from);
  void apply(Operation& operation);

  Options options_;
  Machine machine_;
  std::vector<cudaStream_t> streams_;
  cudaStream_t network_ = nullptr;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::mt19937_64 random_;
  int num_busy_ = 0;
  bool tells_losses_ = true;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_ONE_SIDED_RANKS_HPP
