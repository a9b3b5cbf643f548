/// Routes over several nodes by emulated GPUs, for which no host waits, with a dispatch and a combine on them. They
/// must give the oracle's tables and bits, also when recorded calls are replayed with other ids.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/internode/node_route_steps.hpp"
#include "emulator/node_ranks.hpp"
#include "oracle/oracle.hpp"
#include "support/random_world.hpp"

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

struct Case {
  int num_nodes = 2;
  int ranks_per_node = 2;
  bool weighted = true;  ///< the combine is
  test::WorldSpec world;
};

test::WorldSpec test_world(const Case& one) {
  test::WorldSpec world = one.world;
  world.num_ranks = one.num_nodes * one.ranks_per_node;
  world.ranks_per_node = one.ranks_per_node;
  return world;
}

constexpr std::int64_t kRowBytes = 48;
constexpr std::int64_t kScales = 3;
/// Initial value of counters.
constexpr std::int64_t kCounted = 1000;
/// Tokens for which the calls have room but which no rank has.
constexpr std::int64_t kSpareTokens = 2;
/// Agreements of the calls.
constexpr std::uint64_t kRouteNumber = 80;
constexpr std::uint64_t kCombineNumber = 81;

/// A route, a dispatch and a combine of one batch.
class Layer {
 public:
  explicit Layer(const Case& spec)
      : spec_(spec),
        ranks_({.num_nodes = spec.num_nodes, .ranks_per_node = spec.ranks_per_node, .seed = spec.world.seed}),
        random_(spec.world.seed),
        own_(to_size(num_ranks())) {
    draw(test_world(spec));
    owners_ = oracle::expert_owners(world_);
    std::vector<std::int32_t> counts(to_size(num_ranks()), 0);
    for (const std::int32_t owner : owners_) local_expert_.push_back(counts[to_size(owner)]++);
    first_of_rank_ = {0};
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::size_t expert = 0; expert < owners_.size(); ++expert) {
        if (owners_[expert] == rank) by_owner_.push_back(static_cast<std::int32_t>(expert));
      }
      first_of_rank_.push_back(static_cast<std::int32_t>(by_owner_.size()));
    }
    for (int rank = 0; rank < num_ranks(); ++rank) prepare(rank);
  }

  int num_ranks() const { return ranks_.num_ranks(); }
  NodeRanks& ranks() { return ranks_; }

  /// Draws another batch of the same shapes.
  void draw(const test::WorldSpec& spec) {
    given_ = test::make_world(spec);
    world_ = oracle::physical_world(given_);
    const auto routed = oracle::route(world_);
    routings_.clear();
    if (routed.ok()) routings_ = *routed;
  }
  void spoil_id(int rank, std::size_t entry, std::int64_t id) { given_.ranks[to_size(rank)].topk_idx[entry] = id; }
  /// Changes a home in a rank's own copy of the placement.
  void spoil_home(int rank, std::size_t physical, std::int32_t logical) {
    own_[to_size(rank)].physical_to_logical[physical] = logical;
  }

  /// Exchanges two homes of different experts in a rank's own copy.
  void swap_homes(int rank) {
    std::int32_t* const homes = own_[to_size(rank)].physical_to_logical;
    const std::int64_t num_physical = world_.options.num_experts;
    std::swap(homes[0],
              *std::find_if(homes, homes + num_physical, [first = homes[0]](auto id) { return id != first; }));
  }

  /// Writes the batch to the memory that the calls read.
  void fill() {
    inputs_ = {};
    inputs_.row_bytes = to_size(kRowBytes);
    inputs_.scale_row_bytes = to_size(kScales * 4);
    returned_ = {};
    returned_.hidden = kRowBytes / 2;
    returned_.weighted = spec_.weighted;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      Own& own = own_[to_size(rank)];
      const oracle::RankTokens& tokens = world_.ranks[to_size(rank)];
      std::ranges::copy(given_.ranks[to_size(rank)].topk_idx, own.ids);
      std::ranges::copy(given_.options.placement.physical_to_logical, own.physical_to_logical);
      std::fill_n(own.counter, given_.options.num_experts, kCounted);
      *own.num_tokens = static_cast<std::int32_t>(test::num_counted_tokens(tokens, world_.num_topk));
      // Entries after the counted tokens may hold anything.
      std::fill(own.ids + *own.num_tokens * world_.num_topk, own.ids + tokens.topk_idx.size(), 1 << 20);
      std::ranges::copy(tokens.topk_weights, own.weights);
      fill_rows(inputs_.x.emplace_back(to_size(tokens.num_tokens * kRowBytes)), own.x);
      fill_rows(inputs_.scales.emplace_back(to_size(tokens.num_tokens * kScales * 4)), own.scales);
      fill_rows(returned_.x.emplace_back(to_size(own.num_rows * kRowBytes)), own.y);
      std::fill_n(own.out_x, own.num_rows * kRowBytes, DeviceMemory::kPattern);
      std::fill_n(own.sums, tokens.num_tokens * kRowBytes, DeviceMemory::kPattern);
    }
  }

  void launch() {
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const Own& own = own_[to_size(rank)];
      cuda::launch(own.route, ranks_.stream(rank));
      cuda::launch(own.dispatch, ranks_.stream(rank));
      cuda::launch(own.combine, ranks_.stream(rank));
    }
  }

  void check() {
    const auto received = oracle::dispatch(world_, routings_, inputs_);
    const auto sums = oracle::combine(world_, routings_, returned_);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      const Own& own = own_[to_size(rank)];
      check_tables(rank);
      for (std::int64_t row = 0; row < own.num_rows; ++row) {
        const bool holds = received[to_size(rank)].holds_token[to_size(row)];
        const std::byte* seen = own.out_x + row * kRowBytes;
        const bool equal = std::equal(seen, seen + kRowBytes, received[to_size(rank)].x.data() + row * kRowBytes);
        const bool untouched =
            std::all_of(seen, seen + kRowBytes, [](std::byte byte) { return byte == DeviceMemory::kPattern; });
        EXPECT_TRUE(holds ? equal : untouched) << "row " << row;
        for (std::int64_t column = 0; holds && column < kScales; ++column) {
          EXPECT_EQ(std::memcmp(own.out_scales.row(row) + column * own.out_scales.column_stride * 4,
                                received[to_size(rank)].scales.data() + (row * kScales + column) * 4, 4),
                    0)
              << "scale " << column << " of row " << row;
        }
      }
      const oracle::Bytes& expected = sums[to_size(rank)].x;
      EXPECT_EQ(std::memcmp(own.sums, expected.data(), expected.size()), 0) << "sums";
    }
  }

  /// Whether the calls have moved no data.
  bool is_untouched() const {
    const auto is_pattern = [](std::byte byte) { return byte == DeviceMemory::kPattern; };
    return std::ranges::all_of(
        own_, [&](const Own& own) { return std::all_of(own.out_x, own.out_x + own.num_rows * kRowBytes, is_pattern); });
  }

 private:
  struct Own {
    std::int64_t num_rows = 0;
    std::int64_t num_local = 0;
    std::int64_t* ids = nullptr;
    std::int32_t* physical_to_logical = nullptr;
    std::int64_t* counter = nullptr;  ///< for logical experts
    float* weights = nullptr;
    std::int32_t* num_tokens = nullptr;
    std::byte* x = nullptr;
    std::byte* scales = nullptr;
    std::byte* out_x = nullptr;
    cuda::ScaleTable out_scales;
    std::byte* y = nullptr;
    std::byte* sums = nullptr;
    cuda::NodeRouteInput input;
    cuda::NodeRouteSteps route;
    cuda::DispatchSteps dispatch;
    cuda::CombineSteps combine;
  };

  bool is_slab() const { return world_.options.layout == Layout::kSlab; }

  /// Fills rows with random bf16 values of magnitude about 1.
  void fill_rows(oracle::Bytes& bytes, std::byte* to) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      const auto upper = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random_)) >> 16);
      std::memcpy(bytes.data() + i, &upper, sizeof(upper));
    }
    std::ranges::copy(bytes, to);
  }

  template <typename T>
  T* allocate(int rank, std::int64_t count) {
    return reinterpret_cast<T*>(ranks_.allocate(rank, to_size(count) * sizeof(T) + 64));
  }

  cuda::CallIdentity identity(int rank, std::uint64_t agreement) {
    cuda::CallIdentity call;
    call.agreement = agreement;
    call.record_number = ++record_number_;
    call.record.operation = agreement == kRouteNumber ? Operation::kRoute : Operation::kCombine;
    call.fault = &ranks_.report(rank).fault;
    call.found = ranks_.found(rank).data();
    return call;
  }

  void prepare(int rank) {
    Own& own = own_[to_size(rank)];
    const std::int64_t num_tokens = world_.ranks[to_size(rank)].num_tokens;
    const std::int64_t capacity = world_.options.slab_capacity;
    own.num_local = first_of_rank_[to_size(rank) + 1] - first_of_rank_[to_size(rank)];
    own.num_rows = is_slab() ? own.num_local * capacity : world_.max_recv_rows[to_size(rank)];
    own.ids = allocate<std::int64_t>(rank, num_tokens * world_.num_topk);
    own.weights = allocate<float>(rank, num_tokens * world_.num_topk);
    own.num_tokens = allocate<std::int32_t>(rank, 1);
    own.x = allocate<std::byte>(rank, num_tokens * kRowBytes);
    own.scales = allocate<std::byte>(rank, num_tokens * kScales * 4);
    own.out_x = allocate<std::byte>(rank, own.num_rows * kRowBytes);
    own.y = allocate<std::byte>(rank, own.num_rows * kRowBytes);
    own.sums = allocate<std::byte>(rank, num_tokens * kRowBytes);

    cuda::NodeRouteInput& input = own.input;
    input.topk_idx = own.ids;
    input.wide_ids = true;
    input.weights = own.weights;
    input.num_tokens_view = own.num_tokens;
    input.num_tokens = num_tokens;
    input.max_tokens = spec_.world.max_tokens + kSpareTokens;
    input.num_topk = world_.num_topk;
    input.num_experts = static_cast<int>(world_.options.num_experts);
    input.num_local_experts = static_cast<int>(own.num_local);
    input.layout = world_.options.layout;
    input.expert_alignment = world_.options.expert_alignment;
    input.slab_capacity = capacity;
    input.max_recv_rows = is_slab() ? 0 : own.num_rows;
    input.placement = {owners_.data(), local_expert_.data(), by_owner_.data(), first_of_rank_.data(), {}};
    const Topology topology = ranks_.topology(rank);
    prepare_homes(rank, topology.ranks_per_node);
    own.counter = allocate<std::int64_t>(rank, given_.options.num_experts);
    input.counters.logical = {own.counter, true};
    const auto shape = cuda::bounded_tables(topology, input, own.num_rows, true);
    const std::size_t tables_bytes = cuda::NodeTables::at(nullptr, shape).size_bytes;
    input.tables = cuda::NodeTables::at(ranks_.allocate(rank, tables_bytes), shape);
    const cuda::RoutedTokens routed = cuda::bounded_tokens(topology, input, own.num_rows);
    const cuda::NodePlace place = ranks_.place(rank);
    auto blocks = cuda::StepBlocks::of({.num_nodes = spec_.num_nodes, .num_sms = 2 * spec_.num_nodes});
    const cuda::CallIdentity dispatched = identity(rank, kRouteNumber);
    const std::size_t route_bytes = cuda::NodeRouteStaging::at(nullptr, topology, input).size_bytes;
    const auto staging = cuda::NodeRouteStaging::at(ranks_.allocate(rank, route_bytes), topology, input);
    own.route = node_route_steps(place, topology, dispatched, input, staging, blocks);

    cuda::DispatchTensors rows;
    rows.x = own.x;
    rows.x_stride = rows.row_bytes = rows.out.x_stride = kRowBytes;
    rows.scales = {own.scales, kScales, 4, kScales, 1};
    // Column-major scales, in slabs with a gap between them.
    const std::int64_t slab_scales = capacity * kScales + 5;
    own.out_scales.num_scales = kScales;
    own.out_scales.element_bytes = 4;
    own.out_scales.row_stride = 1;
    own.out_scales.column_stride = is_slab() ? capacity : own.num_rows;
    if (is_slab()) {
      own.out_scales.slab_rows = capacity;
      own.out_scales.slab_stride = slab_scales;
    }
    own.out_scales.data =
        allocate<std::byte>(rank, (is_slab() ? own.num_local * slab_scales : own.num_rows * kScales) * 4);
    rows.out.scales = own.out_scales;
    rows.format = plan::TokenRecord::of({kScales * 4, world_.num_topk, false, false, false});
    rows.out.x = own.out_x;
    const std::size_t rows_bytes = cuda::DispatchStaging::at(nullptr, routed, rows).size_bytes;
    const auto rows_staging = cuda::DispatchStaging::at(ranks_.allocate(rank, rows_bytes), routed, rows);
    own.dispatch = dispatch_steps(place, dispatched, routed, rows, rows_staging, blocks);
    own.dispatch.exchange.begins_call = false;

    cuda::CombineTensors sums;
    sums.x = own.y;
    sums.x_stride = sums.row_bytes = sums.out_stride = kRowBytes;
    sums.weighted = spec_.weighted;
    sums.topk_weights = spec_.weighted ? input.tables.weights : nullptr;
    sums.out_x = own.sums;
    const std::size_t sums_bytes = cuda::CombineStaging::at(nullptr, place, routed, sums).size_bytes;
    const auto sums_staging = cuda::CombineStaging::at(ranks_.allocate(rank, sums_bytes), place, routed, sums);
    own.combine = combine_steps(place, identity(rank, kCombineNumber), routed, sums, sums_staging, blocks);
  }

  /// Prepares a placement that only the GPU knows, if there is one.
  void prepare_homes(int rank, int ranks_per_node) {
    Own& own = own_[to_size(rank)];
    const Placement& placement = given_.options.placement;
    const auto num_physical = static_cast<std::int64_t>(placement.physical_to_logical.size());
    own.physical_to_logical = allocate<std::int32_t>(rank, num_physical);
    if (num_physical == 0) return;
    cuda::HomesParams& homes = own.input.homes;
    homes.physical_to_logical = own.physical_to_logical;
    homes.owner = owners_.data();
    homes.num_physical = static_cast<int>(num_physical);
    homes.num_logical = static_cast<int>(given_.options.num_experts);
    homes.rank = rank;
    homes.ranks_per_node = ranks_per_node;
    homes.nearest = placement.choice == ReplicaChoice::kNearest;
    homes.ranges = allocate<plan::HomeRange>(rank, homes.num_logical);
    homes.homes = allocate<std::int32_t>(rank, num_physical);
    homes.logical_of = allocate<std::int32_t>(rank, num_physical);
    homes.check = allocate<cuda::HomesCheck>(rank, 1);
    own.input.placement.homes = {homes.ranges, homes.homes, homes.logical_of, homes.num_logical, homes.check};
  }

  void check_tables(int rank) const {
    const cuda::NodeTables& tables = own_[to_size(rank)].input.tables;
    std::vector<std::int64_t> counted = oracle::count_rows(given_, to_size(rank));
    for (std::int64_t& count : counted) count += kCounted;
    EXPECT_TRUE(std::equal(counted.begin(), counted.end(), own_[to_size(rank)].counter));
    const oracle::RankRouting& expected = routings_[to_size(rank)];
    const auto equal = [](const auto& values, const auto* seen) {
      return std::equal(values.begin(), values.end(), seen);
    };
    EXPECT_EQ(tables.summary->valid, 1U);
    EXPECT_EQ(tables.summary->num_used_rows, expected.num_used_rows);
    EXPECT_TRUE(equal(expected.slots, tables.slots));
    EXPECT_TRUE(equal(expected.num_rows_per_local_expert, tables.rows_per_expert));
    EXPECT_TRUE(equal(expected.expert_row_offsets, tables.row_offsets));  // no offsets in kTokens
    EXPECT_TRUE(equal(expected.source, reinterpret_cast<const oracle::Source*>(tables.source)));
    EXPECT_TRUE(equal(world_.ranks[to_size(rank)].topk_idx, tables.ids));
    for (int source = 0; source < num_ranks(); ++source) {
      if (world_.options.layout != Layout::kTokens) break;
      for (int to = 0; to < num_ranks(); ++to) {
        EXPECT_EQ(tables.rank_counts[source * num_ranks() + to],
                  routings_[to_size(to)].num_rows_from_rank[to_size(source)]);
      }
    }
  }

  Case spec_;
  NodeRanks ranks_;
  std::mt19937_64 random_;
  oracle::World given_;
  oracle::World world_;  ///< world after the tokens have picked their homes
  std::vector<oracle::RankRouting> routings_;
  std::vector<std::int32_t> owners_, local_expert_, by_owner_, first_of_rank_;
  std::vector<Own> own_;
  oracle::DispatchInputs inputs_;
  oracle::CombineInputs returned_;
  std::int64_t record_number_ = 0;
};

test::WorldSpec slab_world(std::uint64_t seed) {
  return {.num_topk = 4,
          .num_experts = 10,
          .max_tokens = 6,
          .counts = test::TokenCounts::kUneven,
          .layout = Layout::kSlab,
          .spare_slab_rows = 2,
          .idle_tail = true,
          .seed = seed};
}

std::vector<Case> cases() {
  std::vector<Case> all = {{.world = slab_world(1)},
                           {.num_nodes = 3, .ranks_per_node = 1, .world = slab_world(2)},
                           {.weighted = false, .world = slab_world(3)},
                           {.num_nodes = 3, .weighted = false, .world = slab_world(4)}};
  all[1].world.pattern = test::RoutingPattern::kDuplicates;
  all[2].world.pattern = test::RoutingPattern::kDuplicates;
  all[2].world.custom_placement = true;
  all[3].world.num_topk = 9;
  // Several homes of each expert, near and far.
  all[0].world.num_replicas = 7;
  all[1].world.num_replicas = 3;
  all[1].world.replica_choice = ReplicaChoice::kRoundRobin;
  // Bounded routes of the other layouts.
  for (const Layout layout : {Layout::kTokens, Layout::kExperts}) {
    Case one{.world = slab_world(5)};
    one.world.layout = layout;
    one.world.expert_alignment = 3;
    one.world.fixed_rows = 100;
    if (layout == Layout::kTokens) one.world.num_replicas = 6;
    all.push_back(one);
    // Tokens for several warps and, of so many experts, for several steps of each of the few that have room to count.
    one.world.num_replicas = -1;
    one.world.num_experts = layout == Layout::kTokens ? 10 : 2000;
    one.world.expert_alignment = 1;
    one.world.max_tokens = 70;
    one.world.fixed_rows = 1200;
    all.push_back(one);
  }
  return all;
}

class NodesRoute : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, NodesRoute, testing::ValuesIn(cases()));

TEST_P(NodesRoute, IsWhatDispatchAndCombineNeed) {
  Layer layer(GetParam());
  layer.fill();
  layer.launch();
  ASSERT_EQ(layer.ranks().run(), "");
  layer.check();
  EXPECT_TRUE(layer.ranks().is_drained());
}

TEST(NodesRouteReplayed, RoutesAnewWhatLiesInTheSameMemory) {
  Case one{.world = slab_world(11)};
  one.world.counts = test::TokenCounts::kEven;
  one.world.fixed_rows = 4 * one.world.max_tokens;
  one.world.num_replicas = 5;  // the placement changes too, in the same memory
  Layer layer(one);
  for (int replay = 0; replay < 3; ++replay) {
    SCOPED_TRACE(replay);
    one.world.seed += static_cast<std::uint64_t>(replay);
    layer.draw(test_world(one));
    layer.fill();
    layer.launch();
    ASSERT_EQ(layer.ranks().run(), "");
    layer.check();
  }
}

void expect_refused(Layer& layer, cuda::Fault kind, int blamed) {
  layer.launch();
  ASSERT_EQ(layer.ranks().run(), "");
  EXPECT_TRUE(layer.is_untouched());
  for (int rank = 0; rank < layer.num_ranks(); ++rank) {
    cuda::FaultReport& fault = layer.ranks().report(rank).fault;
    EXPECT_EQ(fault.state, 1U);
    EXPECT_EQ(fault.fault, static_cast<std::int32_t>(kind));
    EXPECT_EQ(fault.rank, blamed);
    fault = {};
  }
}

TEST(NodesRouteRefused, APlacementInMemoryThatIsWrongOrDiffers) {
  Case one{.world = slab_world(31)};
  one.world.num_replicas = 0;
  Layer layer(one);
  layer.fill();
  layer.spoil_home(1, 3, 10);
  expect_refused(layer, cuda::Fault::kBadHome, 1);
  layer.fill();
  layer.spoil_home(3, 3, -1);
  expect_refused(layer, cuda::Fault::kMissingHome, 3);
  layer.draw(test_world(one));
  layer.fill();
  layer.launch();
  ASSERT_EQ(layer.ranks().run(), "");
  layer.check();
}

TEST(NodesRouteRefused, APlacementInMemoryThatIsAnotherOnOneRank) {
  Case one{.world = slab_world(32)};
  one.world.num_replicas = 8;
  Layer layer(one);
  layer.fill();
  layer.swap_homes(2);
  expect_refused(layer, cuda::Fault::kOtherHomes, 2);
  layer.fill();
  layer.swap_homes(0);
  expect_refused(layer, cuda::Fault::kOtherHomes, 1);
}

/// Every rank finds the fault by itself, names the same cause, and moves no data in the combine on that Routing either.
TEST(NodesRouteRefused, ABadIdAndAFullSlab) {
  Case one{.weighted = false, .world = slab_world(21)};
  one.world.counts = test::TokenCounts::kEven;
  one.world.idle_tail = false;
  one.world.fixed_rows = 4 * one.world.max_tokens - 1;
  Layer layer(one);
  const auto expect_refused = [&layer](cuda::Fault kind, int blamed) {
    layer.fill();
    emulator::expect_refused(layer, kind, blamed);
  };
  layer.spoil_id(2, 5, 77);
  expect_refused(cuda::Fault::kBadId, 2);
  // One expert gets all tokens but has room for fewer.
  for (int rank = 0; rank < layer.num_ranks(); ++rank) {
    for (std::size_t entry = 0; entry < 24; entry += 4) layer.spoil_id(rank, entry, 9);
  }
  layer.spoil_id(2, 5, -1);
  expect_refused(cuda::Fault::kSlabCapacity, 3);
  layer.draw(test_world(one));
  layer.fill();
  layer.launch();
  ASSERT_EQ(layer.ranks().run(), "");
  layer.check();
}

}  // namespace
}  // namespace ferry::emulator
