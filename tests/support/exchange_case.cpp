#include "support/exchange_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "support/random_payload.hpp"

namespace ferry::test {
namespace {

using oracle::RankCombined;
using oracle::RankReceived;
using oracle::RankRouting;
using Random = std::mt19937_64;

std::int64_t draw(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}
bool one_in(Random& random, std::int64_t n) { return draw(random, 1, n) == 1; }

DType dispatched_dtype(const DispatchSpec& spec) {
  if (spec.quantize == Quantization::kNone) return spec.dtype;
  return spec.quantize == Quantization::kInt8 ? DType::kInt8 : DType::kFloat8E4M3;
}

/// One array of [T, K] weights per rank.
std::vector<std::vector<float>> random_weights(Random& random, const PreparedCase& prepared) {
  std::vector<std::vector<float>> weights;
  for (const oracle::RankTokens& tokens : prepared.world.ranks)
    weights.push_back(random_floats(random, tokens.topk_idx.size()));
  return weights;
}

/// `slabs`: L if the rows belong to a slab.
TensorSpec scale_spec(const DispatchSpec& spec, std::int64_t rows, std::int64_t slabs = 0) {
  TensorSpec scales = dense(spec.scale_dtype, rows, spec.num_scales);
  const std::int64_t slab_rows = slabs > 0 ? rows / slabs : rows;
  switch (spec.scale_strides) {
    case ScaleStrides::kDense:
      break;
    case ScaleStrides::kRowGaps:
      scales.row_stride = spec.num_scales + 3;
      break;
    case ScaleStrides::kColumnMajor:
      scales.row_stride = 1;
      scales.col_stride = rows + 2;
      break;
    case ScaleStrides::kColumnSteps:
      scales.row_stride = 2 * spec.num_scales + 1;
      scales.col_stride = 2;
      break;
    case ScaleStrides::kSlabRows:
      if (slabs == 0) break;
      scales.row_stride = spec.num_scales + 1;
      scales.slab_stride = slab_rows * scales.row_stride + 5;
      break;
    case ScaleStrides::kSlabColumns:
      if (slabs == 0) break;
      scales.row_stride = 1;
      scales.col_stride = slab_rows + 3;
      scales.slab_stride = spec.num_scales * scales.col_stride + 7;
      break;
  }
  if (scales.slab_stride != 0) {
    scales.num_dims = 3;
    scales.slabs = slabs;
  }
  return scales;
}

/// Payload of rank `rank`'s received rows.
TensorSpec recv_payload_spec(const PreparedCase& prepared, int rank, DType dtype, std::int64_t hidden) {
  const RankRouting& routing = prepared.routings[static_cast<std::size_t>(rank)];
  TensorSpec spec = payload_rows(dtype, routing.num_recv_rows, hidden, prepared.spec.gap_granules);
  if (prepared.slabs(rank)) {
    spec.num_dims = 3;
    spec.slabs = static_cast<std::int64_t>(routing.local_expert_ids.size());
  }
  return spec;
}

TensorSpec token_payload_spec(const PreparedCase& prepared, int rank, DType dtype, std::int64_t hidden) {
  return payload_rows(dtype, prepared.num_tokens(rank), hidden, prepared.spec.gap_granules);
}

TensorSpec token_table_spec(const PreparedCase& prepared, int rank) {
  return dense(DType::kFloat32, prepared.num_tokens(rank), prepared.world.num_topk);
}

/// Weights of received rows: [rows, K] for kTokens, [rows] otherwise.
TensorSpec recv_weights_spec(const PreparedCase& prepared, int rank) {
  const std::int64_t rows = prepared.routings[static_cast<std::size_t>(rank)].num_recv_rows;
  if (prepared.world.options.layout == Layout::kTokens) return dense(DType::kFloat32, rows, prepared.world.num_topk);
  TensorSpec spec = dense(DType::kFloat32, rows, 1);
  spec.num_dims = 1;
  return spec;
}

/// Takes rows that hold tokens from `packed`; other rows are zero, or keep the earlier pattern.
TensorImage padded_image(const TensorSpec& spec, const RankReceived& received, const void* packed, bool zero_padding) {
  TensorImage image(spec);
  const std::size_t row_bytes = static_cast<std::size_t>(spec.cols) * size_bytes(spec.dtype);
  for (std::int64_t row = 0; row < spec.rows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    if (received.holds_token[at]) image.set_row(row, static_cast<const std::byte*>(packed) + at * row_bytes);
    if (!received.holds_token[at] && zero_padding) image.clear_row(row);
  }
  return image;
}

TensorImage full_image(const TensorSpec& spec, const void* packed) {
  TensorImage image(spec);
  image.set_rows(packed);
  return image;
}

TensorImage id_image(const TensorSpec& spec, const std::vector<std::int64_t>& ids) {
  if (spec.dtype == DType::kInt64) return full_image(spec, ids.data());
  const std::vector<std::int32_t> narrow(ids.begin(), ids.end());
  return full_image(spec, narrow.data());
}

std::vector<RankDispatch> prepare_dispatch(const PreparedCase& prepared, const DispatchSpec& spec, Random& random) {
  const oracle::World& world = prepared.world;
  const bool tokens_layout = world.options.layout == Layout::kTokens;
  oracle::DispatchInputs inputs;
  inputs.row_bytes = static_cast<std::size_t>(spec.hidden) * size_bytes(spec.dtype);
  const bool quantizes = spec.quantize != Quantization::kNone;
  inputs.quantize = spec.quantize;
  inputs.scale_dtype = spec.scale_dtype;
  inputs.scale_row_bytes = quantizes ? 0 : static_cast<std::size_t>(spec.num_scales) * size_bytes(spec.scale_dtype);
  for (const oracle::RankTokens& tokens : world.ranks) {
    const auto num_tokens = static_cast<std::size_t>(tokens.num_tokens);
    inputs.x.push_back(quantizes ? random_activations(random, tokens.num_tokens, spec.hidden)
                                 : random_bytes(random, num_tokens * inputs.row_bytes));
    inputs.scales.push_back(random_bytes(random, num_tokens * inputs.scale_row_bytes));
  }
  if (spec.own_weights) inputs.topk_weights = random_weights(random, prepared);
  const oracle::World left = oracle::without_ranks(world, prepared.spec.masked);
  const std::vector<RankReceived> received = oracle::dispatch(left, prepared.routings, inputs);

  std::vector<RankDispatch> ranks;
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const RankReceived& got = received[at];
    const std::int64_t rows = prepared.routings[at].num_recv_rows;
    const bool by_slab = world.options.layout == Layout::kSlab;
    const auto slabs = static_cast<std::int64_t>(by_slab ? prepared.routings[at].local_expert_ids.size() : 0);
    const TensorSpec recv_weights = recv_weights_spec(prepared, rank);
    const TensorSpec ids = dense(spec.id_dtype, tokens_layout ? rows : 0, world.num_topk);
    ranks.push_back({
        .x = full_image(token_payload_spec(prepared, rank, spec.dtype, spec.hidden), inputs.x[at].data()),
        .scales = quantizes ? TensorImage({})
                            : full_image(scale_spec(spec, prepared.num_tokens(rank)), inputs.scales[at].data()),
        .topk_weights = spec.own_weights ? full_image(token_table_spec(prepared, rank), inputs.topk_weights[at].data())
                                         : TensorImage({}),
        .out_x = padded_image(recv_payload_spec(prepared, rank, dispatched_dtype(spec), spec.hidden), got, got.x.data(),
                              spec.zero_padding),
        .out_scales = padded_image(scale_spec(spec, rows, slabs), got, got.scales.data(), spec.zero_padding),
        .out_topk_idx = id_image(ids, got.topk_idx),
        .out_topk_weights = padded_image(recv_weights, got, got.topk_weights.data(), spec.zero_padding),
        .out_source = full_image(dense(DType::kInt32, rows, 2), got.source.data()),
    });
  }
  return ranks;
}

std::vector<RankCombine> prepare_combine(const PreparedCase& prepared, const CombineSpec& spec, Random& random) {
  const oracle::World& world = prepared.world;
  oracle::CombineInputs inputs;
  inputs.dtype = spec.dtype;
  inputs.hidden = spec.hidden;
  inputs.weighted = spec.weighted;
  inputs.order = spec.order;
  inputs.wire_format = spec.wire_format;
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    const std::int64_t rows = prepared.routings[static_cast<std::size_t>(rank)].num_recv_rows;
    inputs.x.push_back(random_payload(random, spec, rows));
    if (spec.return_weights) {
      const TensorSpec weights = recv_weights_spec(prepared, rank);
      inputs.weights.push_back(random_floats(random, static_cast<std::size_t>(weights.rows * weights.cols)));
    }
    for (std::size_t bias = 0; bias < static_cast<std::size_t>(spec.num_biases); ++bias)
      inputs.bias[bias].push_back(random_payload(random, spec, prepared.num_tokens(rank)));
  }
  if (spec.own_weights) inputs.topk_weights = random_weights(random, prepared);
  const oracle::World left =
      oracle::without_ranks(oracle::without_ranks(world, prepared.spec.masked), prepared.spec.combine_masked);
  std::vector<RankCombined> combined = oracle::combine(left, prepared.routings, inputs);
  // Masked ranks have tokens, but their results are not checked.
  const auto row_bytes = static_cast<std::size_t>(spec.hidden) * size_bytes(spec.dtype);
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    combined[static_cast<std::size_t>(rank)].x.resize(static_cast<std::size_t>(prepared.num_tokens(rank)) * row_bytes);
  }

  std::vector<RankCombine> ranks;
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    // Rows without a token keep the pattern: a combine that reads them gives sums that differ from the oracle's.
    RankReceived held;
    for (const oracle::Source& source : prepared.routings[at].source) held.holds_token.push_back(source.holds_token());
    held.holds_token.resize(static_cast<std::size_t>(prepared.routings[at].num_recv_rows));
    const TensorSpec token_rows = token_payload_spec(prepared, rank, spec.dtype, spec.hidden);
    const auto bias_image = [&](std::size_t bias) {
      return inputs.bias[bias].empty() ? TensorImage({}) : full_image(token_rows, inputs.bias[bias][at].data());
    };
    const TensorSpec table = token_table_spec(prepared, rank);
    ranks.push_back({
        .x = padded_image(recv_payload_spec(prepared, rank, spec.dtype, spec.hidden), held, inputs.x[at].data(), false),
        .weights = spec.return_weights
                       ? padded_image(recv_weights_spec(prepared, rank), held, inputs.weights[at].data(), false)
                       : TensorImage({}),
        .topk_weights = spec.own_weights ? full_image(table, inputs.topk_weights[at].data()) : TensorImage({}),
        .bias = {bias_image(0), bias_image(1)},
        .out_x = full_image(token_rows, combined[at].x.data()),
        .out_weights = spec.return_weights ? full_image(table, combined[at].weights.data()) : TensorImage({}),
    });
  }
  return ranks;
}

}  // namespace

PreparedCase prepare(const ExchangeCase& spec) {
  Random random(spec.world.seed ^ 0x5DEECE66DULL);
  PreparedCase prepared;
  prepared.spec = spec;
  prepared.given = make_world(spec.world);
  prepared.world = oracle::physical_world(prepared.given, spec.masked);
  prepared.routings = oracle::route(oracle::without_ranks(prepared.world, spec.masked)).value();
  for (DispatchSpec& dispatch : prepared.spec.dispatches) {
    if (dispatch.quantize == Quantization::kNone) continue;
    const std::int64_t channels_per_scale = dispatch.scale_dtype == DType::kInt32 ? 512 : 128;
    dispatch.num_scales = (dispatch.hidden + channels_per_scale - 1) / channels_per_scale;
  }
  for (const DispatchSpec& dispatch : prepared.spec.dispatches)
    prepared.dispatches.push_back(prepare_dispatch(prepared, dispatch, random));
  for (const CombineSpec& combine : spec.combines)
    prepared.combines.push_back(prepare_combine(prepared, combine, random));
  return prepared;
}

ExchangeCase draw_case(Random& random, int num_ranks) {
  constexpr std::array<DType, 5> kPayloads = {DType::kBfloat16, DType::kFloat8E4M3, DType::kUint8, DType::kFloat32,
                                              DType::kFloat16};
  constexpr std::array<DType, 3> kScales = {DType::kFloat32, DType::kInt32, DType::kUint8};
  ExchangeCase spec;
  spec.world = draw_world_spec(random, num_ranks);
  spec.name = fmt::format("random world {}", spec.world.seed);
  spec.id_dtype = one_in(random, 2) ? DType::kInt64 : DType::kInt32;
  spec.memory = static_cast<MemoryKind>(draw(random, 0, 2));
  spec.gap_granules = one_in(random, 2) ? 0 : draw(random, 1, 3);
  spec.slab_view = spec.world.layout == Layout::kSlab && one_in(random, 2);
  for (std::int64_t count = draw(random, 1, 2); count > 0; --count) {
    DispatchSpec dispatch;
    dispatch.dtype = kPayloads[static_cast<std::size_t>(draw(random, 0, kPayloads.size() - 1))];
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(dispatch.dtype));
    dispatch.hidden =
        (one_in(random, 8) ? draw(random, 1, 200) : draw(random, 1, 12)) * kRowGranuleBytes / element_bytes;
    dispatch.num_scales = one_in(random, 2) ? 0 : draw(random, 1, 9);
    dispatch.scale_dtype = kScales[static_cast<std::size_t>(draw(random, 0, kScales.size() - 1))];
    dispatch.scale_strides = static_cast<ScaleStrides>(draw(random, 0, 3));
    dispatch.zero_padding = one_in(random, 2);
    dispatch.own_weights = one_in(random, 4);
    dispatch.ask_tables = !one_in(random, 4);
    dispatch.id_dtype = one_in(random, 2) ? DType::kInt64 : DType::kInt32;
    spec.dispatches.push_back(dispatch);
  }
  for (std::int64_t count = draw(random, 1, 2); count > 0; --count) {
    CombineSpec combine;
    combine.dtype = one_in(random, 2) ? DType::kBfloat16 : DType::kFloat32;
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(combine.dtype));
    combine.hidden = draw(random, 1, 12) * kRowGranuleBytes / element_bytes;
    combine.own_weights = !spec.world.weights || one_in(random, 4);
    combine.weighted = one_in(random, 2);
    combine.num_biases = static_cast<int>(draw(random, 0, 2));
    combine.return_weights = one_in(random, 2);
    combine.values = one_in(random, 3) ? Values::kSpecial : Values::kRandom;
    spec.combines.push_back(combine);
  }
  return spec;
}

}  // namespace ferry::test
