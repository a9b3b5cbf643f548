#pragma GCC diagnostic ignored "-Wsign-conversion"
#include "emulator/latency_combine.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

/// Random rows; one element in 64 has random bits: NaNs, infinities, subnormals.
oracle::Bytes random_rows(std::int64_t num_elements, bool float32, std::mt19937_64& random) {
  constexpr std::uint64_t kOneIn = 64;
  oracle::Bytes rows(to_size(num_elements * (float32 ? 4 : 2)));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < num_elements; ++i) {
    auto bits = std::bit_cast<std::uint32_t>(normal(random));
    if (random() % kOneIn == 0) bits = static_cast<std::uint32_t>(random());
    const std::uint32_t upper = bits >> 16;
    if (float32) {
      std::memcpy(rows.data() + 4 * i, &bits, 4);
    } else {
      std::memcpy(rows.data() + 2 * i, &upper, 2);
    }
  }
  return rows;
}

}  // namespace

LatencyCombine::LatencyCombine(LatencyRanks& ranks, const LatencyRouting& routing, const LatencyCombineSpec& spec)
    : ranks_(ranks), routing_(routing), spec_(spec) {
  std::mt19937_64 random(spec.seed);
  inputs_.dtype = spec.float32 ? DType::kFloat32 : DType::kBfloat16;
  inputs_.hidden = spec.hidden;
  inputs_.weighted = true;
  inputs_.order = spec.order;
  if (spec.fp8) inputs_.wire_format = WireFormat::kFp8;
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    const std::int64_t num_rows = routing.num_rows(rank);
    const oracle::Bytes& rows = inputs_.x.emplace_back(random_rows(num_rows * spec.hidden, spec.float32, random));
    x_.emplace_back(to_size(num_rows * stride()));
    for (std::int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(x_.back().data() + row * stride(), rows.data() + row * row_bytes(), to_size(row_bytes()));
    }
    out_.emplace_back(to_size(routing.num_tokens(rank) * stride()));
    if (!spec.own_weights) continue;
    std::vector<float>& weights = inputs_.topk_weights.emplace_back();
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < routing.num_tokens(rank) * routing.world().num_topk; ++i) {
      weights.push_back(normal(random));
    }
  }
  expected_ = oracle::combine(oracle::without_ranks(routing.left(), spec.masked), routing.routings(), inputs_);
}

const float* LatencyCombine::weights_of(int rank) const {
  return spec_.own_weights ? inputs_.topk_weights[static_cast<std::size_t>(rank)].data()
                           : routing_.tables(rank).weights;
}

cuda::LatencyParams LatencyCombine::call(int rank, std::uint64_t agreement) const {
  cuda::LatencyParams call = routing_.params(ranks_, rank);
  call.agreement = agreement;
  call.record_number = 100 + rank;
  call.num_blocks = spec_.num_blocks + rank % 2;
  return call;
}

cuda::CombineRows LatencyCombine::rows() const {
  const cuda::RowKind of_dtype = spec_.float32 ? cuda::RowKind::kFloat32 : cuda::RowKind::kBfloat16;
  cuda::CombineRows rows{row_bytes(), spec_.fp8 ? cuda::RowKind::kFp8Sums : of_dtype, spec_.order};
  const bool words = spec_.words && spec_.order == CombineOrder::kRankSums && !ranks_.masks();
  if (words) {
    const cuda::LatencyParams any = call(0, 0);
    rows.word_step_vectors =
        spec_.fp8 ? cuda::fp8_step_vectors(ranks_.layout(), row_bytes(), any.max_tokens, any.ranks.num_ranks)
                  : ranks_.layout().word_step_vectors(row_bytes(), any.max_tokens, any.ranks.num_ranks);
  }
  return rows;
}

cuda::CombineSendParams LatencyCombine::send_params(int rank, std::uint64_t agreement) const {
  cuda::CombineSendParams params;
  params.call = call(rank, agreement);
  params.rows = rows();
  params.x = x_[static_cast<std::size_t>(rank)].data();
  params.x_stride = stride();
  params.own_weights = spec_.own_weights;
  params.weights = spec_.own_weights ? weights_of(rank) : nullptr;
  return params;
}

cuda::CombineReceiveParams LatencyCombine::receive_params(int rank, std::uint64_t agreement) {
  cuda::CombineReceiveParams params;
  params.call = call(rank, agreement);
  params.rows = rows();
  params.out = out_[static_cast<std::size_t>(rank)].data();
  params.out_stride = stride();
  params.weights = weights_of(rank);
  return params;
}

void LatencyCombine::send_other(int rank, std::uint64_t other_agreement) {
  cuda::launch_combine_send(send_params(rank, other_agreement), ranks_.mask(rank), ranks_.stream(rank));
}

void LatencyCombine::receive_other(int rank, std::uint64_t other_agreement) {
  cuda::launch_combine_receive(receive_params(rank, other_agreement), ranks_.mask(rank), ranks_.stream(rank));
}

void LatencyCombine::run_whole(int rank) {
  cuda::LatencyCombineParams params{send_params(rank, spec_.agreement), receive_params(rank, spec_.agreement)};
  params.receive.first_receiver += spec_.num_helpers;
  cuda::launch_latency_combine(params, {}, ranks_.stream(rank));
}

void LatencyCombine::refuse(int rank) {
  cuda::LatencyRefusalParams params;
  params.call.ranks = ranks_.params(rank);
  params.call.layout = ranks_.layout();
  params.call.record_number = 100 + rank;
  params.kind = cuda::LatencyKind::kCombine;
  ranks_.refuse(params);
}

void LatencyCombine::send(int rank) { send_other(rank, spec_.agreement); }
void LatencyCombine::receive(int rank) { receive_other(rank, spec_.agreement); }

std::string LatencyCombine::compare(int rank) const {
  const DeviceMemory& out = out_[static_cast<std::size_t>(rank)];
  const oracle::Bytes& expected = expected_[static_cast<std::size_t>(rank)].x;
  const auto text = [rank](const char* what, std::int64_t token, std::int64_t at) {
    return "rank " + std::to_string(rank) + ", token " + std::to_string(token) + ": " + what + " at byte " +
           std::to_string(at);
  };
  for (std::int64_t token = 0; token < routing_.num_tokens(rank); ++token) {
    const std::byte* row = out.data() + token * stride();
    for (std::int64_t i = 0; i < row_bytes(); ++i) {
      if (row[i] != expected[to_size(token * row_bytes() + i)]) return text("another sum", token, i);
    }
    for (std::int64_t i = row_bytes(); i < stride(); ++i) {
      if (row[i] != DeviceMemory::kPattern) return text("a write between rows", token, i);
    }
  }
  return out.is_guarded() ? "" : text("a write after the rows", routing_.num_tokens(rank), 0);
}

bool LatencyCombine::is_untouched(int rank) const {
  const DeviceMemory& out = out_[static_cast<std::size_t>(rank)];
  return std::all_of(out.data(), out.data() + out.size(),
                     [](std::byte byte) { return byte == DeviceMemory::kPattern; });
}

}  // namespace ferry::emulator
