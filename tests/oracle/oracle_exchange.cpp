#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>

#include "oracle/oracle.hpp"

namespace ferry::oracle {
namespace {

constexpr std::uint16_t kBfloat16Nan = 0x7FFF;
constexpr std::uint32_t kFloat32Nan = 0x7FFFFFFF;

float float_from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t bfloat16_from_float(float value) {
  if (std::isnan(value)) return kBfloat16Nan;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t truncated = bits >> 16;
  const std::uint32_t rest = bits & 0xFFFFU;
  const bool up = rest > 0x8000U || (rest == 0x8000U && (truncated & 1U) != 0);
  return static_cast<std::uint16_t>(truncated + (up ? 1U : 0U));
}

/// Element `idx` of an array of `dtype`, as f32.
float load(const Bytes& array, DType dtype, std::size_t idx) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, array.data() + idx * sizeof(value), sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, array.data() + idx * sizeof(bits), sizeof(bits));
  return float_from_bfloat16(bits);
}

/// `value` rounded to `dtype`, as f32.
float round_to(DType dtype, float value) {
  return dtype == DType::kFloat32 ? value : float_from_bfloat16(bfloat16_from_float(value));
}

/// Stores `value`, rounded to `dtype`, as element `idx`.
void store(Bytes& array, DType dtype, std::size_t idx, float value) {
  if (dtype == DType::kFloat32) {
    const std::uint32_t bits = std::isnan(value) ? kFloat32Nan : std::bit_cast<std::uint32_t>(value);
    std::memcpy(array.data() + idx * sizeof(bits), &bits, sizeof(bits));
  } else {
    const std::uint16_t bits = bfloat16_from_float(value);
    std::memcpy(array.data() + idx * sizeof(bits), &bits, sizeof(bits));
  }
}

void copy_row(const Bytes& from, std::size_t from_row, Bytes& to, std::size_t to_row, std::size_t row_bytes) {
  std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_row * row_bytes), row_bytes,
              to.begin() + static_cast<std::ptrdiff_t>(to_row * row_bytes));
}

/// Weights of rank `rank`: those of this call if given, else those of route.
const std::vector<float>& weights_of(const World& world, const std::vector<std::vector<float>>& given,
                                     std::size_t rank) {
  return given.empty() ? world.ranks[rank].topk_weights : given[rank];
}

/// Expert of the kExperts or kSlab group that contains `row`.
std::int32_t expert_of_row(const RankRouting& routing, std::int64_t row) {
  for (std::size_t local = 0; local < routing.local_expert_ids.size(); ++local) {
    if (row >= routing.expert_row_offsets[local] && row < routing.expert_row_offsets[local + 1])
      return routing.local_expert_ids[local];
  }
  return -1;
}

/// Weight of (token, expert) for kExperts and kSlab: duplicates are added in k order.
float weight_of_expert(const std::int64_t* ids, const float* weights, int num_topk, std::int32_t expert) {
  bool found = false;
  float sum = 0;
  for (int k = 0; k < num_topk; ++k) {
    if (ids[k] != expert) continue;
    sum = found ? sum + weights[k] : weights[k];
    found = true;
  }
  return sum;
}

/// One entry (token, k) of a token, in the order of combine: sorted by (rank, row, k).
struct Entry {
  int rank = 0;
  std::int64_t row = 0;
  int k = 0;
  friend bool operator<(const Entry& a, const Entry& b) {
    return std::tie(a.rank, a.row, a.k) < std::tie(b.rank, b.row, b.k);
  }
};

/// Entries of one token that name an expert, in the order of the sums.
std::vector<Entry> entries_of(const World& world, const std::vector<std::int32_t>& owners, const RankRouting& routing,
                              std::size_t rank, std::int64_t token) {
  std::vector<Entry> entries;
  for (int k = 0; k < world.num_topk; ++k) {
    const auto at = static_cast<std::size_t>(token * world.num_topk + k);
    const std::int64_t expert = world.ranks[rank].topk_idx[at];
    if (expert >= 0) entries.push_back({owners[static_cast<std::size_t>(expert)], routing.slots[at], k});
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

/// Entries with each (rank, row) once.
std::vector<Entry> distinct_rows(const std::vector<Entry>& entries) {
  std::vector<Entry> rows;
  for (const Entry& entry : entries) {
    if (rows.empty() || rows.back().rank != entry.rank || rows.back().row != entry.row) rows.push_back(entry);
  }
  return rows;
}

/// Runs of entries whose ranks are on the same node, in ascending node order.
std::vector<std::vector<Entry>> split_by_node(const std::vector<Entry>& entries, int ranks_per_node) {
  std::vector<std::vector<Entry>> nodes;
  for (const Entry& entry : entries) {
    if (nodes.empty() || nodes.back().front().rank / ranks_per_node != entry.rank / ranks_per_node)
      nodes.emplace_back();
    nodes.back().push_back(entry);
  }
  return nodes;
}

/// Whether rows travel as FP8; with kRankSums the sums of ranks do.
bool quantizes_rows(const CombineInputs& in) {
  return in.wire_format == WireFormat::kFp8 && in.order != CombineOrder::kRankSums;
}

/// Dtype of `in.x` once travelled() has been applied.
DType row_dtype(const CombineInputs& in) { return quantizes_rows(in) ? DType::kFloat32 : in.dtype; }

Bytes pack(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Inputs whose rows have the values, in f32, that they have after they travelled. Other arrays keep `dtype`.
CombineInputs travelled(const CombineInputs& given) {
  CombineInputs inputs = given;
  if (!quantizes_rows(given)) return inputs;
  for (Bytes& x : inputs.x) x = pack(after_fp8(x, given.dtype));
  return inputs;
}

/// `acc` plus channel `h` of the terms. `weights` is null for an unweighted sum.
float add_terms(const CombineInputs& in, const std::vector<Entry>& terms, const float* weights, std::int64_t h,
                float acc) {
  for (const Entry& term : terms) {
    const float y = load(in.x[static_cast<std::size_t>(term.rank)], row_dtype(in),
                         static_cast<std::size_t>(term.row * in.hidden + h));
    acc = weights != nullptr ? std::fma(weights[term.k], y, acc) : acc + y;
  }
  return acc;
}

/// A rank's sum of its entries of a token, [H], with the values that it has after it has travelled.
std::vector<float> sum_on_rank(const CombineInputs& in, const std::vector<Entry>& of_rank, const float* weights) {
  std::vector<float> sums;
  for (std::int64_t h = 0; h < in.hidden; ++h) sums.push_back(add_terms(in, of_rank, weights, h, 0.0F));
  if (in.wire_format == WireFormat::kFp8) return after_fp8(pack(sums), DType::kFloat32);
  for (float& sum : sums) sum = round_to(in.dtype, sum);
  return sums;
}

/// Sums of a token, [H], as CombineOrder::kRankSums forms them: each rank sums its entries, each node its ranks, and
/// the source its nodes, with rounding at each level, or in place of the first an FP8 row. The last one is left to the
/// caller.
std::vector<float> add_rank_sums(const World& world, const CombineInputs& in, const std::vector<Entry>& entries,
                                 const float* weights) {
  const auto hidden = static_cast<std::size_t>(in.hidden);
  std::vector<float> token_sums(hidden, 0.0F);
  for (int first_rank = 0; first_rank < world.num_ranks; first_rank += world.ranks_per_node) {
    bool node_has_entries = false;
    std::vector<float> node_sums(hidden, 0.0F);
    for (int rank = first_rank; rank < first_rank + world.ranks_per_node; ++rank) {
      std::vector<Entry> of_rank;
      for (const Entry& entry : entries) {
        if (entry.rank == rank) of_rank.push_back(entry);
      }
      if (of_rank.empty()) continue;
      node_has_entries = true;
      const std::vector<float> rank_sums = sum_on_rank(in, of_rank, weights);
      for (std::size_t h = 0; h < hidden; ++h) node_sums[h] = node_sums[h] + rank_sums[h];
    }
    if (world.ranks_per_node == world.num_ranks) return node_sums;
    if (!node_has_entries) continue;
    for (std::size_t h = 0; h < hidden; ++h) token_sums[h] = token_sums[h] + round_to(in.dtype, node_sums[h]);
  }
  return token_sums;
}

/// Returned weight of entry (token, k) for kTokens: the sum over all rows of the token, including rows of other
/// entries, first inside nodes.
float sum_returned_weights(const World& world, const CombineInputs& in, const std::vector<std::vector<Entry>>& nodes,
                           int k) {
  const auto node_sum = [&](const std::vector<Entry>& rows) {
    float sum = 0;
    for (const Entry& entry : rows)
      sum += in.weights[static_cast<std::size_t>(entry.rank)][static_cast<std::size_t>(entry.row * world.num_topk + k)];
    return sum;
  };
  float sum = 0;
  if (world.ranks_per_node == world.num_ranks) return nodes.empty() ? sum : node_sum(nodes.front());
  for (const std::vector<Entry>& rows : nodes) sum += node_sum(rows);
  return sum;
}

DispatchInputs quantize_inputs(const DispatchInputs& given) {
  DispatchInputs inputs;
  inputs.topk_weights = given.topk_weights;
  inputs.row_bytes = given.row_bytes / size_bytes(DType::kBfloat16);
  for (const Bytes& x : given.x) {
    QuantizedRows rows = quantize(x, inputs.row_bytes, given.quantize, given.scale_dtype);
    inputs.scale_row_bytes = rows.scale_row_bytes;
    inputs.x.push_back(std::move(rows.x));
    inputs.scales.push_back(std::move(rows.scales));
  }
  return inputs;
}

}  // namespace

std::vector<RankReceived> dispatch(const World& world, const std::vector<RankRouting>& routings,
                                   const DispatchInputs& given) {
  const DispatchInputs inputs = given.quantize == Quantization::kNone ? given : quantize_inputs(given);
  const std::vector<std::int32_t> owners = expert_owners(world);
  const int num_topk = world.num_topk;
  const bool tokens_layout = world.options.layout == Layout::kTokens;
  std::vector<RankReceived> received(routings.size());
  for (std::size_t rank = 0; rank < routings.size(); ++rank) {
    const RankRouting& routing = routings[rank];
    RankReceived& out = received[rank];
    const auto num_rows = static_cast<std::size_t>(routing.num_recv_rows);
    const std::size_t num_entries = tokens_layout ? num_rows * static_cast<std::size_t>(num_topk) : num_rows;
    out.holds_token.assign(num_rows, false);
    out.x.resize(num_rows * inputs.row_bytes);
    out.scales.resize(num_rows * inputs.scale_row_bytes);
    if (tokens_layout) out.topk_idx.assign(num_entries, -1);
    out.source = routing.source;
    out.source.resize(num_rows);

    out.topk_weights.assign(num_entries, 0.0F);

    for (std::size_t row = 0; row < num_rows; ++row) {
      const Source source = out.source[row];
      if (!source.holds_token()) continue;
      const auto source_rank = static_cast<std::size_t>(source.rank);
      const auto token = static_cast<std::size_t>(source.token);
      out.holds_token[row] = true;
      copy_row(inputs.x[source_rank], token, out.x, row, inputs.row_bytes);
      if (inputs.scale_row_bytes != 0)
        copy_row(inputs.scales[source_rank], token, out.scales, row, inputs.scale_row_bytes);

      const std::size_t first_entry = token * static_cast<std::size_t>(num_topk);
      const std::int64_t* ids = world.ranks[source_rank].topk_idx.data() + first_entry;
      const std::vector<float>& weights = weights_of(world, inputs.topk_weights, source_rank);
      if (!tokens_layout) {
        if (!weights.empty())
          out.topk_weights[row] = weight_of_expert(ids, weights.data() + first_entry, num_topk,
                                                   expert_of_row(routing, static_cast<std::int64_t>(row)));
        continue;
      }
      for (std::size_t k = 0; k < static_cast<std::size_t>(num_topk); ++k) {
        if (ids[k] < 0 || owners[static_cast<std::size_t>(ids[k])] != static_cast<std::int32_t>(rank)) continue;
        const auto& locals = routing.local_expert_ids;
        const auto local = std::find(locals.begin(), locals.end(), static_cast<std::int32_t>(ids[k])) - locals.begin();
        out.topk_idx[row * static_cast<std::size_t>(num_topk) + k] = local;
        if (!weights.empty()) out.topk_weights[row * static_cast<std::size_t>(num_topk) + k] = weights[first_entry + k];
      }
    }
  }
  return received;
}

std::vector<RankCombined> combine(const World& world, const std::vector<RankRouting>& routings,
                                  const CombineInputs& given) {
  const CombineInputs inputs = travelled(given);
  const std::vector<std::int32_t> owners = expert_owners(world);
  const bool one_node = world.ranks_per_node == world.num_ranks;
  std::vector<RankCombined> combined(routings.size());
  for (std::size_t rank = 0; rank < routings.size(); ++rank) {
    RankCombined& out = combined[rank];
    const std::int64_t num_tokens = world.ranks[rank].num_tokens;
    const std::vector<float>& topk_weights = weights_of(world, inputs.topk_weights, rank);
    out.x.resize(static_cast<std::size_t>(num_tokens * inputs.hidden) * size_bytes(inputs.dtype));
    if (!inputs.weights.empty()) out.weights.assign(static_cast<std::size_t>(num_tokens * world.num_topk), 0.0F);

    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::vector<Entry> entries = entries_of(world, owners, routings[rank], rank, token);
      const std::vector<Entry> rows = distinct_rows(entries);
      const std::vector<Entry>& terms = inputs.weighted ? entries : rows;
      const float* weights = inputs.weighted ? topk_weights.data() + token * world.num_topk : nullptr;

      if (inputs.order == CombineOrder::kRankSums) {
        const std::vector<float> sums = add_rank_sums(world, inputs, entries, weights);
        const auto first = static_cast<std::size_t>(token * inputs.hidden);
        for (std::size_t h = 0; h < sums.size(); ++h) store(out.x, inputs.dtype, first + h, sums[h]);
        continue;
      }
      const std::vector<std::vector<Entry>> terms_by_node = split_by_node(terms, world.ranks_per_node);
      for (std::int64_t h = 0; h < inputs.hidden; ++h) {
        const auto at = static_cast<std::size_t>(token * inputs.hidden + h);
        float acc = 0.0F;
        for (const std::vector<Bytes>& bias : inputs.bias) {
          if (!bias.empty()) acc = acc + load(bias[rank], inputs.dtype, at);
        }
        if (one_node) {
          acc = add_terms(inputs, terms, weights, h, acc);
        } else {
          for (const std::vector<Entry>& node_terms : terms_by_node)
            acc = acc + round_to(inputs.dtype, add_terms(inputs, node_terms, weights, h, 0.0F));
        }
        store(out.x, inputs.dtype, at, acc);
      }

      if (inputs.weights.empty()) continue;
      const std::vector<std::vector<Entry>> nodes = split_by_node(rows, world.ranks_per_node);
      const auto first_entry = static_cast<std::size_t>(token * world.num_topk);
      if (world.options.layout == Layout::kTokens) {
        for (int k = 0; k < world.num_topk; ++k)
          out.weights[first_entry + static_cast<std::size_t>(k)] = sum_returned_weights(world, inputs, nodes, k);
      } else {
        for (const Entry& entry : entries)
          out.weights[first_entry + static_cast<std::size_t>(entry.k)] =
              inputs.weights[static_cast<std::size_t>(entry.rank)][static_cast<std::size_t>(entry.row)];
      }
    }
  }
  return combined;
}

}  // namespace ferry::oracle
