#ifndef FERRY_TESTS_EMULATOR_NODE_RANKS_HPP
#define FERRY_TESTS_EMULATOR_NODE_RANKS_HPP

/// Ranks of several nodes on emulated GPUs: the parameters that the library's host side gives to kernels, and a slow
/// network.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/internode/steps.hpp"
#include "emulator/emulator.hpp"
#include "emulator/latency_ranks.hpp"

namespace ferry::emulator {

class NodeRanks {
 public:
  struct Options {
    int num_nodes = 2;
    int ranks_per_node = 1;
    std::uint64_t seed = 1;
    std::size_t num_chunks = 2;
    std::size_t chunk_bytes = 1024;
    std::size_t arena_bytes = std::size_t{1} << 20;
    int moves_one_in = 2;  ///< the network moves data in one of this many turns
    bool has_call_rings = false;
  };
  static constexpr std::uint64_t kTimeoutNs = 30'000'000'000;

  explicit NodeRanks(const Options& options);

  int num_ranks() const { return options_.num_nodes * options_.ranks_per_node; }
  Topology topology(int rank) const { return {rank, num_ranks(), options_.ranks_per_node}; }
  const Options& options() const { return options_; }
  Machine& machine() { return machine_; }
  cudaStream_t stream(int rank) const { return streams_[static_cast<std::size_t>(rank)]; }
  cuda::NodePlace place(int rank);
  cuda::DeviceReport& report(int rank) { return one(rank).report; }
  /// [ranks of the node, nodes]
  std::vector<cuda::FoundRecord>& found(int rank) { return one(rank).found; }
  /// Allocates from the rank's arena, filled with a pattern; valid as long as the ranks.
  std::byte* allocate(int rank, std::size_t bytes);
  /// Machine::limit_blocks for the streams of all ranks.
  void limit_blocks(unsigned max_blocks);
  /// Delays the work queued next on the rank's stream.
  void delay(int rank, std::uint64_t time_ns);
  /// Makes the network take no more data from the rank.
  void cut(int rank) { one(rank).is_cut = true; }
  /// Cuts the rank off after this many chunks.
  void cut_after(int rank, int num_chunks) { one(rank).chunks_left = num_chunks; }
  /// Runs all queued work, and the network as long as needed.
  std::string run();
  /// Chunks that a rank has sent to its rail peer in a node so far, call headers among them.
  std::uint64_t num_sent(int rank, int node) { return one(rank).rings[0].num_sent[static_cast<std::size_t>(node)]; }
  /// Whether all sent chunks have been used.
  bool is_drained() const;

 private:
  struct Rings {
    std::vector<net::RingWords> words;  // by node
    DeviceMemory chunks_in;
    DeviceMemory chunks_out;
    std::vector<std::uint64_t> num_sent;  // by node
  };
  struct Rank {
    DeviceMemory arena;
    std::size_t used_bytes = 0;
    cuda::DeviceReport report{};
    std::unique_ptr<cuda::RailState> state;
    cuda::RailLog* log = nullptr;  // in the arena
    std::vector<cuda::FoundRecord> found;
    std::array<Rings, 2> rings;  // for items, and for call headers if there are any
    bool is_cut = false;
    int chunks_left = -1;  // negative: no limit
  };
  Rank& one(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  int node_of(int rank) const { return rank / options_.ranks_per_node; }
  bool move_one();
  bool move_chunk(int rank, int to_node, std::size_t which);
  std::size_t num_chunks_of(std::size_t which) const;

  Options options_;
  Machine machine_;
  std::vector<cudaStream_t> streams_;
  cudaStream_t network_ = nullptr;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::mt19937_64 random_;
  int num_busy_ = 0;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_NODE_RANKS_HPP
