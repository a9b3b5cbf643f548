#include "planning/rate_presets.hpp"

#include <array>
#include <string>

namespace ferry::tools {

namespace {

struct PresetRate {
  Rate Rates::*member;
  double value;
  RateOrigin origin;
  std::string_view source;
};

constexpr RateOrigin kMeasured = RateOrigin::kMeasured;
constexpr RateOrigin kAssumed = RateOrigin::kAssumed;

constexpr std::string_view kRings = "cuda-nodes-h200-x2/gpu_rings.json: one H200, 4 blocks a ring, 128 and 512 KiB";
constexpr std::string_view kChunks =
    "card_2x1_dispatch_fp8_512.json of cuda-nodes-h200-x4 and -x2, whose limit is the proxy, over a stand-in for a "
    "card";
constexpr std::string_view kShared =
    "cuda-h200-x1/nodes_latency.json, T = 1: route and a former dispatch share evenly what is left of all three calls";
constexpr std::string_view kCardPair =
    "cuda-nodes-h200-x4/card_2x1_*.json, T = 512 to 4096 over a stand-in for a card: hardly anything is left";
constexpr std::string_view kCardNear = "cuda-nodes-h200-x4: card_2x2_*.json beside card_2x1_*.json, T = 512 to 4096";

constexpr std::string_view kCard = "cuda-nodes-h200-x2/card_2x1_small_latency.json, over a stand-in for a card";
constexpr std::string_view kWords = "cuda-nodes-h200-x2/gpu_rings.json: a block that polls a word of its own";
constexpr std::string_view kMessage =
    "cuda-nodes-h200-x4: card_2x2_latency_1.json beside card_2x1_latency_1.json, of an earlier version";
constexpr std::string_view kMany = "cuda-nodes-h200-x2/card_2x1_small_rows_latency.json";

/// Rates of everything between nodes, for both GPUs: no run between hosts has been made.
constexpr std::array<PresetRate, 17> kNodes = {{
    {&Rates::network_gbit, 400, kAssumed, "one card of 400 Gbit/s for each GPU"},
    {&Rates::network_share, 0.978, kMeasured, "cuda-nodes-h200-x2/nodes.json: rings over a copy held to 20 Gbit/s"},
    {&Rates::network_us, 5, kAssumed, "RDMA through two switches, with notification"},
    {&Rates::ring_gbps, 33.2, kMeasured, kRings},
    {&Rates::ring_chunk_us, 3.98, kMeasured, kRings},
    {&Rates::host_memory_gbps, 600, kAssumed, "data sheet: two sockets of eight channels of DDR5-4800"},
    {&Rates::proxy_chunk_us, 5.9, kMeasured, kChunks},
    {&Rates::node_dispatch_us, 1, kMeasured, kCardPair},
    {&Rates::node_combine_us, 5, kMeasured, kCardPair},
    {&Rates::near_dispatch_us, 20, kMeasured, kCardNear},
    {&Rates::near_combine_us, 34, kMeasured, kCardNear},
    {&Rates::node_route_us, 52, kMeasured, kShared},
    {&Rates::far_dispatch_us, 2.0, kMeasured, kCard},
    {&Rates::far_combine_us, 4.4, kMeasured, kCard},
    {&Rates::far_word_us, 1.2, kMeasured, kWords},
    {&Rates::far_message_us, 2.4, kMeasured, kMessage},
    {&Rates::far_many_us, 4, kMeasured, kMany},
}};

constexpr std::string_view kPair4 = "cuda-h200-x4: tokens_bf16.json, T = 512, and pair_bf16.json";
constexpr std::string_view kLatency4 = "cuda-h200-x4/latency_pair_fp8.json, T = 1, 32 and 128";
constexpr std::string_view kRoute4 = "cuda-h200-x4/route.json, T = 512 and 4096";
constexpr std::string_view kPlain4 = "cuda-h200-x4: tokens_bf16_plain.json, T = 512, and pair_bf16_plain.json";
constexpr std::string_view kSums = "docs/experiments-kernels.md: a combine of 2 H200 on 12 multiprocessors";

constexpr std::array<PresetRate, 18> kH200 = {{
    {&Rates::nvlink_push_gbps, 343.7, kMeasured, kPair4},
    {&Rates::nvlink_pull_gbps, 332.1, kMeasured, kPair4},
    {&Rates::sm_copy_gbps, 44, kMeasured, "cuda-h200-x4/pair_bf16.json: raw pushes on 7 multiprocessors"},
    {&Rates::sm_sum_gbps, 43, kMeasured, kSums},
    {&Rates::hbm_gbps, 4800, kAssumed, "data sheet of H200 SXM"},
    {&Rates::dispatch_us, 18.4, kMeasured, kPair4},
    {&Rates::combine_us, 20.0, kMeasured, kPair4},
    {&Rates::plain_dispatch_us, 14.4, kMeasured, kPlain4},
    {&Rates::plain_dispatch_gbps, 3265, kMeasured, kPlain4},
    {&Rates::plain_combine_us, 14.0, kMeasured, kPlain4},
    {&Rates::route_counts_us, 28.4, kMeasured, kRoute4},
    {&Rates::route_tables_us, 8.8, kMeasured, kRoute4},
    {&Rates::route_entry_ns, 0.10, kMeasured, kRoute4},
    {&Rates::latency_dispatch_us, 8.7, kMeasured, kLatency4},
    {&Rates::latency_combine_us, 6.3, kMeasured, kLatency4},
    {&Rates::latency_flags_us, 3.3, kMeasured, kLatency4},
    {&Rates::latency_gbps, 226, kMeasured, kLatency4},
    {&Rates::latency_host_us, 7.2, kMeasured, kLatency4},
}};

constexpr std::string_view kPair2 = "cuda-h100-x2/pair_bf16.json, T = 512 and 4096";
constexpr std::string_view kLatency2 = "cuda-h100-x2/latency_pair_fp8.json, T = 1, 32 and 128";
constexpr std::string_view kRoute2 = "cuda-h100-x2/route.json, T = 512 and 4096";
constexpr std::string_view kPlain2 = "cuda-h100-x2/plain_bf16.json, T = 512 and 4096";

constexpr std::array<PresetRate, 18> kH100 = {{
    {&Rates::nvlink_push_gbps, 346.6, kMeasured, kPair2},
    {&Rates::nvlink_pull_gbps, 339.9, kMeasured, kPair2},
    {&Rates::sm_copy_gbps, 44, kMeasured, "cuda-h200-x4/pair_bf16.json: raw pushes on 7 multiprocessors of an H200"},
    {&Rates::sm_sum_gbps, 43, kMeasured, kSums},
    {&Rates::hbm_gbps, 3350, kAssumed, "data sheet of H100 SXM"},
    {&Rates::dispatch_us, 19.7, kMeasured, kPair2},
    {&Rates::combine_us, 18.6, kMeasured, kPair2},
    {&Rates::plain_dispatch_us, 14.1, kMeasured, kPlain2},
    {&Rates::plain_dispatch_gbps, 2625, kMeasured, kPlain2},
    {&Rates::plain_combine_us, 11.0, kMeasured, kPlain2},
    {&Rates::route_counts_us, 19.5, kMeasured, kRoute2},
    {&Rates::route_tables_us, 10.7, kMeasured, kRoute2},
    {&Rates::route_entry_ns, 0.12, kMeasured, kRoute2},
    {&Rates::latency_dispatch_us, 9.0, kMeasured, kLatency2},
    {&Rates::latency_combine_us, 6.3, kMeasured, kLatency2},
    {&Rates::latency_flags_us, 4.6, kMeasured, kLatency2},
    {&Rates::latency_gbps, 181, kMeasured, kLatency2},
    {&Rates::latency_host_us, 6.4, kMeasured, kLatency2},
}};

}  // namespace

std::optional<Rates> preset_rates(std::string_view name) {
  if (name != "h100" && name != "h200") return std::nullopt;
  Rates rates;
  rates.name = rates.base = name;
  const auto set = [&rates](const PresetRate& rate) {
    rates.*(rate.member) = {rate.value, rate.origin, std::string(rate.source)};
  };
  for (const PresetRate& rate : name == "h100" ? kH100 : kH200) set(rate);
  for (const PresetRate& rate : kNodes) set(rate);
  return rates;
}

}  // namespace ferry::tools
