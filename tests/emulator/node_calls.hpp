#ifndef FERRY_TESTS_EMULATOR_NODE_CALLS_HPP
#define FERRY_TESTS_EMULATOR_NODE_CALLS_HPP

/// Dispatch and combine over several nodes by emulated GPUs, and the oracle's results for them.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "emulator/node_routing.hpp"
#include "emulator/routed_tokens.hpp"
#include "plan/to_size.hpp"

namespace ferry::emulator {

struct NodesSpec {
  int num_nodes = 2;
  int ranks_per_node = 1;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 9;
  int num_topk = 3;
  std::int64_t num_experts = 8;
  std::int64_t hidden = 24;
  bool float32 = false;
  bool weighted = false;
  int num_biases = 0;
  bool wide_ids = false;
  std::int64_t scale_bytes = 12;
  std::int64_t slab_capacity = 0;
  std::int64_t alignment = 1;
  std::size_t num_chunks = 2;
  std::size_t chunk_bytes = 1024;
  std::uint64_t seed = 1;
  std::size_t arena_bytes = std::size_t{1} << 20;
  bool has_call_rings = false;
  int chunk_items = 0;  ///< of rank 0; each other rank has one more than the previous one. 0: none has any
};

inline oracle::World make_nodes_world(const NodesSpec& spec) {
  oracle::World world;
  world.num_ranks = spec.num_nodes * spec.ranks_per_node;
  world.ranks_per_node = spec.ranks_per_node;
  world.num_topk = spec.num_topk;
  world.options.num_experts = spec.num_experts;
  world.options.layout = spec.layout;
  world.options.slab_capacity = spec.slab_capacity;
  world.options.expert_alignment = spec.alignment;
  draw_tokens(world, spec.num_tokens, spec.seed);
  return world;
}

inline oracle::Bytes random_bytes(std::int64_t num_bytes, std::mt19937_64& random) {
  oracle::Bytes bytes(to_size(num_bytes));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Random finite numbers of either type, of magnitude about 1.
inline oracle::Bytes random_rows(std::int64_t num_elements, bool float32, std::mt19937_64& random) {
  oracle::Bytes rows(to_size(num_elements * (float32 ? 4 : 2)));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < num_elements; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(normal(random));
    const std::uint32_t upper = bits >> 16;
    std::memcpy(rows.data() + to_size(i) * (float32 ? 4 : 2), float32 ? &bits : &upper, float32 ? 4 : 2);
  }
  return rows;
}

/// One group, and calls on it.
class NodeCalls {
 public:
  explicit NodeCalls(const NodesSpec& spec)
      : spec_(spec),
        ranks_({.num_nodes = spec.num_nodes,
                .ranks_per_node = spec.ranks_per_node,
                .seed = spec.seed,
                .num_chunks = spec.num_chunks,
                .chunk_bytes = spec.chunk_bytes,
                .arena_bytes = spec.arena_bytes,
                .has_call_rings = spec.has_call_rings}),
        routing_(ranks_, make_nodes_world(spec)),
        random_(spec.seed + 1) {}

  NodeRanks& ranks() { return ranks_; }
  cuda::CallIdentity identity(int rank, std::uint64_t agreement) {
    cuda::CallIdentity call;
    call.agreement = agreement;
    call.record_number = ++record_number_;
    call.record.fields[0] = rank;
    call.fault = &ranks_.report(rank).fault;
    call.found = ranks_.found(rank).data();
    return call;
  }

  struct Dispatched {
    oracle::DispatchInputs inputs;
    std::vector<cuda::DispatchTensors> tensors;
  };
  /// Queues a dispatch; `other`: rank that makes a different call; -1: none.
  Dispatched dispatch(int other = -1) {
    Dispatched call;
    call.inputs.row_bytes = to_size(spec_.hidden * 2);
    call.inputs.scale_row_bytes = to_size(spec_.scale_bytes);
    draw(call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const std::int64_t num_rows = std::max<std::int64_t>(routing_.num_rows(rank), 1);
      const std::int64_t entries = spec_.layout == Layout::kTokens ? spec_.num_topk : 1;
      cuda::DispatchTensors tensors;
      tensors.x = copy_in(rank, call.inputs.x[to_size(rank)]);
      tensors.x_stride = tensors.row_bytes = spec_.hidden * 2;
      const int element = spec_.scale_bytes % 4 == 0 ? 4 : 1;
      const int num_scales = static_cast<int>(spec_.scale_bytes) / element;
      if (num_scales > 0) {
        tensors.scales = {copy_in(rank, call.inputs.scales[to_size(rank)]), num_scales, element, num_scales, 1};
        // Scales of the output are column-major.
        tensors.out.scales = {ranks_.allocate(rank, to_size(num_rows * spec_.scale_bytes)), num_scales, element, 1,
                              num_rows};
      }
      tensors.weights = routing_.tables(rank).weights;
      tensors.format = plan::TokenRecord::of({spec_.scale_bytes, spec_.num_topk, true, true, false});
      tensors.out.x = ranks_.allocate(rank, to_size(num_rows * out_stride()));
      tensors.out.x_stride = out_stride();
      if (spec_.layout == Layout::kTokens) tensors.out.ids = ranks_.allocate(rank, to_size(num_rows * entries * 8));
      tensors.out.wide_ids = spec_.wide_ids;
      tensors.out.weights = reinterpret_cast<float*>(ranks_.allocate(rank, to_size(num_rows * entries * 4)));
      const cuda::RoutedTokens routed = routing_.routed(rank);
      const auto staging = cuda::DispatchStaging::at(
          ranks_.allocate(rank, cuda::DispatchStaging::at(nullptr, routed, tensors).size_bytes), routed, tensors);
      const std::uint64_t agreement = rank == other ? 0 : 77;
      const cuda::NodePlace place = ranks_.place(rank);
      const cuda::CallIdentity call_identity = identity(rank, agreement);
      if (agreement == 0) {
        enqueue([params = cuda::agreement_only(place, call_identity), stream = ranks_.stream(rank)] {
          cuda::launch_rail_exchange(params, stream);
        });
      } else {
        auto blocks = cuda::StepBlocks::of({.num_nodes = spec_.num_nodes,
                                            .num_sms = 2 * spec_.num_nodes + 3 * rank,
                                            .num_copy_sms = rank % 3,
                                            .wide_rings = spec_.seed % 2 == 0});
        blocks.chunk_items = chunk_items(rank);
        enqueue([steps = dispatch_steps(place, call_identity, routed, tensors, staging, blocks),
                 stream = ranks_.stream(rank)] { cuda::launch(steps, stream); });
      }
      call.tensors.push_back(tensors);
    }
    return call;
  }

  void check(const Dispatched& call) {
    const auto expected = oracle::dispatch(routing_.world(), routing_.routings(), call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) check(call, rank, expected[to_size(rank)]);
  }

  struct Combined {
    oracle::CombineInputs inputs;
    std::vector<cuda::CombineTensors> tensors;
  };
  /// Another call in place of a combine that all other ranks make.
  enum class Instead { kRefusal, kOtherWeights };
  /// Queues a combine. `others`: ranks that make a different call.
  Combined combine(const std::vector<int>& others = {}, Instead instead = Instead::kRefusal) {
    Combined call;
    call.inputs.dtype = spec_.float32 ? DType::kFloat32 : DType::kBfloat16;
    call.inputs.hidden = spec_.hidden;
    call.inputs.weighted = spec_.weighted;
    draw(call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const std::int64_t num_tokens = std::max<std::int64_t>(routing_.num_tokens(rank), 1);
      const bool is_other = std::ranges::find(others, rank) != others.end();
      cuda::CombineTensors tensors;
      tensors.row_bytes = tensors.x_stride = spec_.hidden * (spec_.float32 ? 4 : 2);
      tensors.x = copy_in(rank, call.inputs.x[to_size(rank)]);
      const std::vector<float>& weights = call.inputs.weights[to_size(rank)];
      auto* given = reinterpret_cast<float*>(ranks_.allocate(rank, weights.size() * 4 + 4));
      std::ranges::copy(weights, given);
      tensors.returns_weights = true;
      tensors.weights = given;
      tensors.float32 = spec_.float32;
      tensors.weighted = spec_.weighted != (is_other && instead == Instead::kOtherWeights);
      tensors.topk_weights = tensors.weighted ? routing_.tables(rank).weights : nullptr;
      for (int bias = 0; bias < spec_.num_biases; ++bias) {
        tensors.bias[bias] = {copy_in(rank, call.inputs.bias[to_size(bias)][to_size(rank)]), tensors.row_bytes};
      }
      tensors.out_stride = tensors.row_bytes + 16;
      tensors.out_x = ranks_.allocate(rank, to_size(num_tokens * tensors.out_stride));
      tensors.out_weights = reinterpret_cast<float*>(ranks_.allocate(rank, to_size(num_tokens * spec_.num_topk * 4)));
      const cuda::RoutedTokens routed = routing_.routed(rank);
      auto blocks = cuda::StepBlocks::of({.num_nodes = spec_.num_nodes, .num_sms = 2 * spec_.num_nodes + 3 * rank});
      blocks.chunk_items = chunk_items(rank);
      const cuda::NodePlace place = ranks_.place(rank);
      const std::size_t staging_bytes = cuda::CombineStaging::at(nullptr, place, routed, tensors).size_bytes;
      const auto staging = cuda::CombineStaging::at(ranks_.allocate(rank, staging_bytes), place, routed, tensors);
      const std::uint64_t agreement = !is_other ? 78 : instead == Instead::kOtherWeights ? 79 : 0;
      const cuda::CallIdentity call_identity = identity(rank, agreement);
      if (agreement == 0) {
        enqueue([params = cuda::agreement_only(place, call_identity), stream = ranks_.stream(rank)] {
          cuda::launch_rail_exchange(params, stream);
        });
      } else {
        enqueue([steps = combine_steps(place, call_identity, routed, tensors, staging, blocks),
                 stream = ranks_.stream(rank)] { cuda::launch(steps, stream); });
      }
      call.tensors.push_back(tensors);
    }
    return call;
  }

  void check(const Combined& call) {
    const auto expected = oracle::combine(routing_.world(), routing_.routings(), call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const cuda::CombineTensors& tensors = call.tensors[to_size(rank)];
      const oracle::RankCombined& one = expected[to_size(rank)];
      for (std::int64_t token = 0; token < routing_.num_tokens(rank); ++token) {
        EXPECT_EQ(std::memcmp(tensors.out_x + token * tensors.out_stride, one.x.data() + token * tensors.row_bytes,
                              to_size(tensors.row_bytes)),
                  0)
            << "sum of token " << token << " of rank " << rank;
      }
      EXPECT_EQ(std::memcmp(tensors.out_weights, one.weights.data(), one.weights.size() * 4), 0)
          << "weights of rank " << rank;
    }
  }

  /// Queues all calls so far again with the same parameters, as replayed graphs launch them.
  void replay() const {
    for (const std::function<void()>& launch : recorded_) launch();
  }
  /// Writes other inputs to the same memory.
  void refill(Dispatched& call) {
    draw(call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const cuda::DispatchTensors& tensors = call.tensors[to_size(rank)];
      std::ranges::copy(call.inputs.x[to_size(rank)], const_cast<std::byte*>(tensors.x));
      std::ranges::copy(call.inputs.scales[to_size(rank)], tensors.scales.data);
      std::fill_n(tensors.out.x, routing_.num_rows(rank) * out_stride(), DeviceMemory::kPattern);
    }
  }
  void refill(Combined& call) {
    draw(call.inputs);
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const cuda::CombineTensors& tensors = call.tensors[to_size(rank)];
      std::ranges::copy(call.inputs.x[to_size(rank)], const_cast<std::byte*>(tensors.x));
      std::ranges::copy(call.inputs.weights[to_size(rank)], const_cast<float*>(tensors.weights));
      for (int bias = 0; bias < spec_.num_biases; ++bias) {
        std::ranges::copy(call.inputs.bias[to_size(bias)][to_size(rank)],
                          const_cast<std::byte*>(tensors.bias[bias].data));
      }
      std::fill_n(tensors.out_x, routing_.num_tokens(rank) * tensors.out_stride, DeviceMemory::kPattern);
    }
  }

  bool is_untouched(const Dispatched& call) {
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const std::byte* out = call.tensors[to_size(rank)].out.x;
      const auto end = out + routing_.num_rows(rank) * out_stride();
      if (!std::all_of(out, end, [](std::byte byte) { return byte == DeviceMemory::kPattern; })) return false;
    }
    return true;
  }

  bool is_untouched(const Combined& call, int rank) {
    const cuda::CombineTensors& tensors = call.tensors[to_size(rank)];
    const auto end = tensors.out_x + routing_.num_tokens(rank) * tensors.out_stride;
    return std::all_of(tensors.out_x, end, [](std::byte byte) { return byte == DeviceMemory::kPattern; });
  }

  bool has_row(const Dispatched& call, int rank, std::int64_t row) {
    const std::byte* out = call.tensors[to_size(rank)].out.x + row * out_stride();
    return std::any_of(out, out + spec_.hidden * 2, [](std::byte byte) { return byte != DeviceMemory::kPattern; });
  }

  /// Rows that rank 0 sends to its rail peer in the other node of two, without calls of other kinds.
  std::int64_t num_items_out() const { return routing_.routed(0).tables.to_nodes[1].num_out; }

 private:
  int chunk_items(int rank) const { return spec_.chunk_items == 0 ? 0 : spec_.chunk_items + rank; }
  std::int64_t out_stride() const { return spec_.hidden * 2 + 32; }

  void enqueue(std::function<void()> launch) {
    launch();
    recorded_.push_back(std::move(launch));
  }

  void draw(oracle::DispatchInputs& inputs) {
    inputs.x.clear();
    inputs.scales.clear();
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      const std::int64_t num_tokens = routing_.num_tokens(rank);
      inputs.x.push_back(random_bytes(num_tokens * spec_.hidden * 2, random_));
      inputs.scales.push_back(random_bytes(num_tokens * spec_.scale_bytes, random_));
    }
  }

  void draw(oracle::CombineInputs& inputs) {
    inputs.x.clear();
    inputs.weights.clear();
    for (auto& bias : inputs.bias) bias.clear();
    std::normal_distribution<float> normal;
    const std::int64_t entries = spec_.layout == Layout::kTokens ? spec_.num_topk : 1;
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      inputs.x.push_back(random_rows(routing_.num_rows(rank) * spec_.hidden, spec_.float32, random_));
      std::vector<float>& weights = inputs.weights.emplace_back();
      for (std::int64_t i = 0; i < routing_.num_rows(rank) * entries; ++i) weights.push_back(normal(random_));
      for (int bias = 0; bias < spec_.num_biases; ++bias) {
        inputs.bias[to_size(bias)].push_back(
            random_rows(routing_.num_tokens(rank) * spec_.hidden, spec_.float32, random_));
      }
    }
  }

  std::byte* copy_in(int rank, const oracle::Bytes& bytes) {
    std::byte* const data = ranks_.allocate(rank, bytes.size() + 16);
    std::ranges::copy(bytes, data);
    return data;
  }

  void check(const Dispatched& call, int rank, const oracle::RankReceived& expected) {
    const cuda::DispatchTensors& tensors = call.tensors[to_size(rank)];
    const std::int64_t num_rows = routing_.num_rows(rank);
    const std::int64_t entries = spec_.layout == Layout::kTokens ? spec_.num_topk : 1;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      if (!expected.holds_token[to_size(row)]) continue;
      const std::string where = "row " + std::to_string(row) + " of rank " + std::to_string(rank);
      EXPECT_EQ(std::memcmp(tensors.out.x + row * tensors.out.x_stride, expected.x.data() + row * tensors.row_bytes,
                            to_size(tensors.row_bytes)),
                0)
          << where;
      const cuda::ScaleTable& scales = tensors.out.scales;
      for (std::int64_t column = 0; column < scales.num_scales; ++column) {
        EXPECT_EQ(
            std::memcmp(scales.data + (row * scales.row_stride + column * scales.column_stride) * scales.element_bytes,
                        expected.scales.data() + row * spec_.scale_bytes + column * scales.element_bytes,
                        to_size(scales.element_bytes)),
            0)
            << "scales of " << where;
      }
      EXPECT_EQ(std::memcmp(tensors.out.weights + row * entries, expected.topk_weights.data() + row * entries,
                            to_size(entries) * 4),
                0)
          << "weights of " << where;
      for (std::int64_t k = 0; k < entries && tensors.out.ids != nullptr; ++k) {
        const std::int64_t at = row * entries + k;
        const std::int64_t id = spec_.wide_ids ? static_cast<const std::int64_t*>(tensors.out.ids)[at]
                                               : static_cast<const std::int32_t*>(tensors.out.ids)[at];
        EXPECT_EQ(id, expected.topk_idx[to_size(at)]) << "id " << k << " of " << where;
      }
    }
  }

  NodesSpec spec_;
  NodeRanks ranks_;
  NodeRouting routing_;
  std::mt19937_64 random_;
  std::int64_t record_number_ = 0;
  std::vector<std::function<void()>> recorded_;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_NODE_CALLS_HPP
