#include "emulator/latency_dispatch.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "numeric/quantize.hpp"

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

oracle::Bytes random_bytes(std::size_t count, std::mt19937_64& random) {
  oracle::Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace

LatencyDispatch::LatencyDispatch(LatencyRanks& ranks, const LatencyRouting& routing, const LatencyDispatchSpec& spec)
    : ranks_(ranks), routing_(routing), spec_(spec) {
  std::mt19937_64 random(spec.seed);
  inputs_.row_bytes = to_size(in_row_bytes());
  inputs_.quantize = spec.quantize;
  inputs_.scale_dtype = spec.scale_dtype;
  if (spec.quantize == Quantization::kNone) {
    inputs_.scale_row_bytes = to_size(spec.num_scales) * size_bytes(spec.scale_dtype);
  }
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    const std::int64_t num_tokens = routing.num_tokens(rank);
    const oracle::Bytes& x = inputs_.x.emplace_back(random_bytes(to_size(num_tokens * in_row_bytes()), random));
    inputs_.scales.push_back(random_bytes(to_size(num_tokens) * inputs_.scale_row_bytes, random));
    x_.emplace_back(to_size(num_tokens * in_stride()));
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      std::memcpy(x_.back().data() + token * in_stride(), x.data() + token * in_row_bytes(), to_size(in_row_bytes()));
    }
    out_x_.emplace_back(to_size(routing.num_rows(rank) * out_stride()));
    out_scales_.emplace_back(to_size(routing.num_rows(rank) * row().num_scales * row().scale_bytes));
    const auto& tokens = routing.given().ranks[static_cast<std::size_t>(rank)].topk_idx;
    ids_.emplace_back(tokens.begin(), tokens.end());
    // Ids of tokens that do not count are never read.
    constexpr std::int64_t kNoExpertAtAll = 1 << 20;
    std::fill(ids_.back().begin() + routing.num_counted(rank) * routing.world().num_topk, ids_.back().end(),
              kNoExpertAtAll);
    narrow_ids_.emplace_back(ids_.back().begin(), ids_.back().end());
  }
  for (std::size_t expert = 0; expert < routing.owners().size(); ++expert) {
    const std::int32_t owner = routing.owners()[expert];
    const auto before = routing.owners().begin() + static_cast<std::ptrdiff_t>(expert);
    local_experts_.push_back(static_cast<std::int32_t>(std::count(routing.owners().begin(), before, owner)));
  }
  if (routing.given().options.placement.present()) {
    list_homes();
  } else if (spec.placed) {
    place();
  }
  expected_ = oracle::dispatch(routing.left(), routing.routings(), inputs_);
}

cuda::LatencyRow LatencyDispatch::row() const {
  cuda::LatencyRow row;
  row.x_bytes = spec_.quantize == Quantization::kNone ? in_row_bytes() : spec_.hidden;
  row.num_scales = spec_.quantize == Quantization::kNone
                       ? spec_.num_scales
                       : static_cast<int>(numeric::num_scale_columns(spec_.hidden, spec_.scale_dtype));
  row.scale_bytes = row.num_scales == 0 ? 0 : static_cast<int>(size_bytes(spec_.scale_dtype));
  return row;
}

cuda::LatencyParams LatencyDispatch::call(int rank, std::uint64_t agreement) const {
  cuda::LatencyParams call = routing_.params(ranks_, rank);
  if (told_capacity_ > 0) call.slab_capacity = told_capacity_;
  call.agreement = agreement;
  call.record_number = 100 + rank;
  call.num_blocks = spec_.num_blocks + rank % 2;
  return call;
}

cuda::PlacementTables LatencyDispatch::placement(int rank) const {
  cuda::PlacementTables tables;
  tables.owner = routing_.owners().data();
  tables.local_expert = local_experts_.data();
  if (homes_.empty()) return tables;
  const plan::HomeTable& homes = homes_[static_cast<std::size_t>(rank)];
  tables.homes.ranges = homes.ranges.data();
  tables.homes.homes = homes.homes.data();
  tables.homes.logical_of = logical_of_.data();
  tables.homes.num_logical = static_cast<int>(homes.ranges.size());
  return tables;
}

/// Makes the ids name other experts, whose homes are the experts that the ids named before.
void LatencyDispatch::list_homes() {
  const oracle::World& given = routing_.given();
  const Placement& placement = given.options.placement;
  logical_of_ = placement.physical_to_logical;
  for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
    homes_.push_back(plan::list_homes({.physical_to_logical = logical_of_,
                                       .physical_to_rank = routing_.owners(),
                                       .num_logical = given.options.num_experts,
                                       .rank = rank,
                                       .ranks_per_node = ranks_.num_ranks(),
                                       .nearest = placement.choice == ReplicaChoice::kNearest}));
  }
}

void LatencyDispatch::place() {
  const auto num_experts = static_cast<std::int32_t>(routing_.owners().size());
  plan::HomeTable homes;
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    homes.ranges.push_back({static_cast<std::uint32_t>(expert), 1});
    homes.homes.push_back((expert + 1) % num_experts);
    logical_of_.push_back((expert + num_experts - 1) % num_experts);
  }
  homes_.assign(static_cast<std::size_t>(ranks_.num_ranks()), homes);
  for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
    std::vector<std::int64_t>& ids = ids_[static_cast<std::size_t>(rank)];
    for (std::int64_t& id : ids) {
      if (id >= 0 && id < num_experts) id = logical_of_[to_size(id)];
    }
    narrow_ids_[static_cast<std::size_t>(rank)].assign(ids.begin(), ids.end());
    const auto num_local = std::count(routing_.owners().begin(), routing_.owners().end(), rank);
    counters_.emplace_back(to_size(num_local));
  }
}

cuda::SlabScales LatencyDispatch::scales(int rank) const {
  if (row().num_scales == 0) return {};
  const std::int64_t columns = row().num_scales;
  std::byte* const data = out_scales_[static_cast<std::size_t>(rank)].data();
  if (spec_.column_major) return {data, capacity() * columns, 1, capacity()};
  return {data, capacity() * columns, columns, 1};
}

cuda::DispatchSendParams LatencyDispatch::send_params(int rank, std::uint64_t agreement) const {
  const auto at = static_cast<std::size_t>(rank);
  cuda::DispatchSendParams params;
  params.call = call(rank, agreement);
  params.placement = placement(rank);
  params.topk_idx = spec_.wide_ids ? static_cast<const void*>(ids_[at].data()) : narrow_ids_[at].data();
  params.wide_ids = spec_.wide_ids;
  if (routing_.has_weights()) params.weights = routing_.world().ranks[at].topk_weights.data();
  params.num_tokens_view = routing_.count(rank);
  params.x = x_[at].data();
  params.x_stride = in_stride();
  params.hidden = spec_.hidden;
  params.quantize = spec_.quantize;
  if (spec_.quantize == Quantization::kNone && spec_.num_scales > 0) {
    params.scales = {inputs_.scales[at].data(), spec_.num_scales, 1};
  }
  params.row = row();
  params.num_senders = params.call.num_blocks - 1;
  return params;
}

cuda::DispatchReceiveParams LatencyDispatch::receive_params(int rank, std::uint64_t agreement) {
  cuda::DispatchReceiveParams params;
  params.call = call(rank, agreement);
  params.placement = placement(rank);
  params.x = out_x_[static_cast<std::size_t>(rank)].data();
  params.x_stride = out_stride();
  params.scales = scales(rank);
  params.row = row();
  params.quantize = spec_.quantize;
  params.zero_padding = spec_.zero_padding;
  params.warps_per_row = spec_.warps_per_row;
  params.num_gap_blocks = spec_.num_gap_blocks;
  if (spec_.placed) params.counters.received = {counters_[static_cast<std::size_t>(rank)].data(), false};
  return params;
}

void LatencyDispatch::send_other(int rank, std::uint64_t agreement) {
  cuda::launch_dispatch_send({send_params(rank, agreement), receive_params(rank, agreement)}, ranks_.mask(rank),
                             ranks_.stream(rank));
}

void LatencyDispatch::receive_other(int rank, std::uint64_t agreement) {
  cuda::launch_dispatch_receive(receive_params(rank, agreement), ranks_.mask(rank), ranks_.stream(rank));
}

cuda::LatencyDispatchParams LatencyDispatch::whole_params(int rank) {
  cuda::LatencyDispatchParams params{send_params(rank, spec_.agreement), receive_params(rank, spec_.agreement)};
  // Every second rank has separate blocks that send and that receive.
  if (rank % 2 == 0) {
    params.receive.first_receiver = params.send.call.num_blocks;
    params.send.call.num_blocks += spec_.num_receivers + spec_.num_gap_blocks;
  } else {
    params.receive.first_receiver += spec_.num_send_only;
  }
  return params;
}

void LatencyDispatch::run_whole(int rank) {
  cuda::launch_latency_dispatch(whole_params(rank), 0, {}, ranks_.stream(rank));
}

void LatencyDispatch::refuse(int rank) {
  cuda::LatencyRefusalParams params;
  params.call.ranks = ranks_.params(rank);
  params.call.layout = ranks_.layout();
  params.call.record_number = 100 + rank;
  params.kind = cuda::LatencyKind::kDispatch;
  ranks_.refuse(params);
}

std::string LatencyDispatch::compare(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  const oracle::RankReceived& expected = expected_[at];
  const cuda::LatencyRow shape = row();
  const cuda::SlabScales to = scales(rank);
  const auto text = [rank](const char* what, std::int64_t row, std::int64_t index) {
    return "rank " + std::to_string(rank) + ", row " + std::to_string(row) + ": " + what + " at " +
           std::to_string(index);
  };
  for (std::int64_t row = 0; row < routing_.num_rows(rank); ++row) {
    const bool holds = expected.holds_token[to_size(row)];
    const bool written = holds || spec_.zero_padding;
    const std::byte* x = out_x_[at].data() + row * out_stride();
    for (std::int64_t i = 0; i < out_stride(); ++i) {
      std::byte byte = DeviceMemory::kPattern;
      if (written && i < shape.x_bytes) byte = holds ? expected.x[to_size(row * shape.x_bytes + i)] : std::byte{0};
      if (x[i] != byte) return text("wrong byte of x", row, i);
    }
    for (std::int64_t column = 0; column < shape.num_scales; ++column) {
      const std::int64_t index =
          row / capacity() * to.expert_stride + row % capacity() * to.row_stride + column * to.column_stride;
      for (std::int64_t i = 0; i < shape.scale_bytes; ++i) {
        const std::int64_t from = (row * shape.num_scales + column) * shape.scale_bytes + i;
        const std::byte byte = holds ? expected.scales[to_size(from)] : written ? std::byte{0} : DeviceMemory::kPattern;
        if (to.data[index * shape.scale_bytes + i] != byte) return text("wrong byte of a scale", row, column);
      }
    }
  }
  for (std::size_t local = 0; spec_.placed && local < counters_[at].size(); ++local) {
    const std::int64_t rows = routing_.routings()[at].num_rows_per_local_expert[local];
    if (counters_[at][local] != rows) return text("wrong count of an expert", rows, counters_[at][local]);
  }
  if (!out_x_[at].is_guarded() || !out_scales_[at].is_guarded()) return text("a write after the rows", 0, 0);
  return routing_.compare(rank);
}

bool LatencyDispatch::is_untouched(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  const auto untouched = [](const DeviceMemory& memory) {
    return std::all_of(memory.data(), memory.data() + memory.size(),
                       [](std::byte byte) { return byte == DeviceMemory::kPattern; });
  };
  return untouched(out_x_[at]) && untouched(out_scales_[at]);
}

}  // namespace ferry::emulator
