#include "planning/model.hpp"

#include <algorithm>
#include <cmath>

namespace ferry::tools {

namespace {

constexpr double kNsPerUs = 1000.0;
/// GB/s are bytes in a nanosecond.
constexpr double kBytesPerUs = 1000.0;
constexpr double kBitsPerByte = 8.0;
/// Largest batch whose sums of latency mode travel as words that are their own flags, and the bytes of words for one of
/// data, for few tokens, for more, and of FP8 sums (src/cuda/latency/window.hpp, fp8_row.hpp).
constexpr std::int64_t kMostWordTokens = 64;
constexpr std::int64_t kMostShortStepTokens = 8;
constexpr double kShortStepBytes = 2.0;
constexpr double kLongStepBytes = 4.0 / 3.0;
constexpr double kFp8WordShare = 1.5;
/// Blocks of an exchange over nodes that serve rings, as docs/inside-nodes.md describes them.
constexpr int kMostBlocksPerRing = 4;
constexpr int kMostRingBlocks = 16;
/// Each byte of a ring in host memory is written and read on both sides.
constexpr double kHostPasses = 4.0;

double us_of(double bytes, double gbps) { return bytes / (gbps * kBytesPerUs); }

class Calls {
 public:
  Calls(const PlanShape& shape, const Rates& rates) : shape_(shape), rates_(rates) {}

  CallPlan route() const;
  CallPlan dispatch() const { return shape_.num_nodes == 1 ? node_dispatch() : nodes_dispatch(); }
  CallPlan combine() const { return shape_.num_nodes == 1 ? node_combine() : nodes_combine(); }
  CallPlan latency_dispatch() const;
  CallPlan latency_combine() const;

 private:
  bool one_node() const { return shape_.num_nodes == 1; }
  static Term fixed(std::string_view name, const Rates& rates, Rate Rates::*rate) {
    return {name, (rates.*rate).value, 0, false, {rate}};
  }
  Term moved(std::string_view name, double bytes, Rate Rates::*rate) const {
    return {name, us_of(bytes, (rates_.*rate).value), bytes, true, {rate}};
  }
  Term by_sms(double bytes, int num_sms, Rate Rates::*rate) const {
    return {"multiprocessors", us_of(bytes, (rates_.*rate).value * num_sms), bytes, true, {rate}};
  }
  /// Share of the rows over links that calls of latency mode take there: those of this node's own tokens.
  double near_share() const { return 1.0 / shape_.num_nodes; }
  double network_gbps() const { return rates_.network_gbit.value / kBitsPerByte; }
  double ring_us(double chunk_bytes) const;
  Term round_trip(int num_trips) const {
    return {"network, first words", num_trips * rates_.network_us.value, 0, false, {&Rates::network_us}};
  }
  void add_exchange(const Traffic& traffic, double sent_bytes, CallPlan* call) const;
  /// Time until the first chunk of an exchange can be used, before which nothing overlaps.
  Term first_chunk(double whole_chunk_bytes) const;
  CallPlan node_dispatch() const;
  CallPlan node_combine() const;
  CallPlan nodes_dispatch() const;
  CallPlan nodes_combine() const;
  /// `writes`: see FarTraffic.
  void add_messages(int num_messages, const FarTraffic::Call& sent, CallPlan* call) const;
  /// Bytes of words for one of data, in sums that travel as words inside a node.
  double word_share() const {
    if (shape_.fp8_sums) return kFp8WordShare;
    return shape_.latency_tokens <= kMostShortStepTokens ? kShortStepBytes : kLongStepBytes;
  }

  const PlanShape& shape_;
  const Rates& rates_;
};

double Calls::ring_us(double chunk_bytes) const {
  if (shape_.rings == PlanRings::kHost) {
    return rates_.ring_chunk_us.value + us_of(chunk_bytes, rates_.ring_gbps.value);
  }
  return us_of(chunk_bytes, rates_.sm_copy_gbps.value);  // by the one block that has the chunk
}

void Calls::add_exchange(const Traffic& traffic, double sent_bytes, CallPlan* call) const {
  const int num_peers = shape_.num_nodes - 1;
  call->network_bytes = sent_bytes;
  call->terms.push_back({"wire",
                         us_of(sent_bytes, network_gbps() * rates_.network_share.value),
                         sent_bytes,
                         true,
                         {&Rates::network_gbit, &Rates::network_share}});
  if (shape_.rings == PlanRings::kHost) {
    call->terms.push_back({"kernels at rings, PCIe",
                           traffic.num_chunks * rates_.ring_chunk_us.value + us_of(sent_bytes, rates_.ring_gbps.value),
                           sent_bytes,
                           true,
                           {&Rates::ring_gbps, &Rates::ring_chunk_us}});
    call->terms.push_back(
        moved("host memory", kHostPasses * sent_bytes * shape_.ranks_per_node, &Rates::host_memory_gbps));
  } else {
    const int per_ring = std::clamp(kMostRingBlocks / (2 * num_peers), 1, kMostBlocksPerRing);
    call->terms.push_back({"kernels at rings",
                           us_of(sent_bytes, rates_.sm_copy_gbps.value * per_ring * num_peers),
                           sent_bytes,
                           true,
                           {&Rates::sm_copy_gbps}});
  }
  call->terms.push_back({"proxy", traffic.num_chunks * rates_.proxy_chunk_us.value, 0, true, {&Rates::proxy_chunk_us}});
  // A ring's chunk can be filled again once the receiver has said that it has used it.
  const double there_and_back =
      2 * (rates_.network_us.value + rates_.proxy_chunk_us.value + ring_us(traffic.chunk_bytes));
  const double ring = static_cast<double>(ring_bytes(shape_.num_nodes, shape_.rings)) / (2 * num_peers);
  call->terms.push_back({"ring depth",
                         sent_bytes / num_peers / ring * there_and_back,
                         0,
                         true,
                         {&Rates::network_us, &Rates::proxy_chunk_us}});
}

Term Calls::first_chunk(double whole_chunk_bytes) const {
  // Long exchanges begin with an eighth of a chunk (cuda/internode/chunk_division.hpp).
  constexpr double kSplitFrom = 256 << 10;
  const double chunk_bytes = whole_chunk_bytes < kSplitFrom ? whole_chunk_bytes : whole_chunk_bytes / 8;
  const double wire = us_of(chunk_bytes, network_gbps());
  return {"first chunk",
          wire + 2 * ring_us(chunk_bytes) + 2 * rates_.proxy_chunk_us.value + rates_.network_us.value,
          chunk_bytes,
          false,
          {&Rates::network_gbit, &Rates::network_us, &Rates::proxy_chunk_us}};
}

CallPlan Calls::route() const {
  CallPlan call{"route", {}, 0, 0};
  const double entries = static_cast<double>(shape_.num_tokens) * shape_.num_topk;
  call.terms.push_back(fixed("counts", rates_, &Rates::route_counts_us));
  call.terms.push_back(fixed("tables", rates_, &Rates::route_tables_us));
  call.terms.push_back(
      {"entries", entries * rates_.route_entry_ns.value / kNsPerUs, 0, false, {&Rates::route_entry_ns}});
  if (one_node()) return call;
  // Hosts exchange counts, then forward tables of 8 bytes a token and 8 an entry.
  const Traffic traffic = traffic_of(shape_, shape_.num_tokens, 0);
  const int num_peers = shape_.num_nodes - 1;
  const double counts = 4.0 * (shape_.num_ranks() + static_cast<double>(shape_.num_experts)) + 8.0 * shape_.num_nodes;
  const double crossing = entries * num_peers / shape_.num_nodes;
  call.network_bytes = num_peers * counts + 8 * (traffic.items_sent + crossing);
  call.terms.push_back(fixed("several nodes", rates_, &Rates::node_route_us));
  call.terms.push_back(round_trip(4));
  call.terms.push_back({"wire",
                        us_of(call.network_bytes, network_gbps() * rates_.network_share.value),
                        call.network_bytes,
                        false,
                        {&Rates::network_gbit, &Rates::network_share}});
  return call;
}

CallPlan Calls::node_dispatch() const {
  CallPlan call{"dispatch", {}, 0, 0};
  const RowBytes rows = row_bytes(shape_);
  const Traffic traffic = traffic_of(shape_, shape_.num_tokens, rows.dispatch);
  const auto row = static_cast<double>(rows.dispatch);
  call.link_bytes = traffic.rows_over_links * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::dispatch_us));
  if (shape_.plain) {
    call.terms.push_back(fixed("staging", rates_, &Rates::plain_dispatch_us));
    Term copies = moved("copies out of staging", call.link_bytes, &Rates::plain_dispatch_gbps);
    copies.overlaps = false;
    call.terms.push_back(copies);
  }
  call.terms.push_back(moved("NVLink", call.link_bytes, &Rates::nvlink_push_gbps));
  call.terms.push_back(by_sms(traffic.rows_received * row, dispatch_sms(shape_), &Rates::sm_copy_gbps));
  const double passes = shape_.plain ? 4 : 2;  // rows are read and written, and once more out of staging
  call.terms.push_back(moved("GPU memory", passes * traffic.rows_received * row, &Rates::hbm_gbps));
  return call;
}

CallPlan Calls::node_combine() const {
  CallPlan call{"combine", {}, 0, 0};
  const RowBytes rows = row_bytes(shape_);
  const Traffic traffic = traffic_of(shape_, shape_.num_tokens, rows.combine);
  const auto row = static_cast<double>(rows.combine);
  call.link_bytes = traffic.rows_over_links * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::combine_us));
  if (shape_.plain) call.terms.push_back(fixed("staging", rates_, &Rates::plain_combine_us));
  call.terms.push_back(moved("NVLink", call.link_bytes, &Rates::nvlink_pull_gbps));
  call.terms.push_back(by_sms(traffic.rows_received * row, combine_sms(shape_), &Rates::sm_sum_gbps));
  const double read = (shape_.plain ? 3 : 1) * traffic.rows_received * row;
  call.terms.push_back(moved("GPU memory", read + static_cast<double>(shape_.num_tokens) * row, &Rates::hbm_gbps));
  return call;
}

CallPlan Calls::nodes_dispatch() const {
  CallPlan call{"dispatch", {}, 0, 0};
  const RowBytes rows = row_bytes(shape_);
  const auto row = static_cast<double>(rows.dispatch);
  const Traffic traffic = traffic_of(shape_, shape_.num_tokens, rows.dispatch);
  const double taken = traffic.rows_received * row;
  call.link_bytes = traffic.rows_over_links * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::dispatch_us));
  call.terms.push_back(fixed("several nodes", rates_, &Rates::node_dispatch_us));
  call.terms.push_back(first_chunk(traffic.chunk_bytes));  // it follows the call's header at once
  add_exchange(traffic, traffic.items_sent * row, &call);
  if (shape_.ranks_per_node > 1) {
    call.terms.push_back(fixed("ranks of the node", rates_, &Rates::near_dispatch_us));
    call.terms.push_back(moved("NVLink", call.link_bytes, &Rates::nvlink_pull_gbps));
  }
  call.terms.push_back(by_sms(2 * traffic.items_sent * row + taken, dispatch_sms(shape_), &Rates::sm_copy_gbps));
  const double local = traffic.items_sent * row + traffic.items_held * row + 2 * taken;
  call.terms.push_back(moved("GPU memory", local, &Rates::hbm_gbps));
  return call;
}

CallPlan Calls::nodes_combine() const {
  CallPlan call{"combine", {}, 0, 0};
  const RowBytes rows = row_bytes(shape_);
  const auto row = static_cast<double>(rows.combine);
  const Traffic traffic = traffic_of(shape_, shape_.num_tokens, rows.combine);
  const double summed = traffic.rows_received * row;
  call.link_bytes = traffic.rows_over_links * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::combine_us));
  call.terms.push_back(fixed("several nodes", rates_, &Rates::node_combine_us));
  call.terms.push_back(first_chunk(traffic.chunk_bytes));
  add_exchange(traffic, traffic.items_sent * row, &call);
  if (shape_.ranks_per_node > 1) {
    call.terms.push_back(fixed("ranks of the node", rates_, &Rates::near_combine_us));
    call.terms.push_back(moved("NVLink", call.link_bytes, &Rates::nvlink_pull_gbps));
  }
  // Tokens are added up over the nodes while their sums come in.
  const double added = 2 * traffic.items_sent * row + summed + traffic.items_held * row;
  call.terms.push_back(by_sms(added, combine_sms(shape_), &Rates::sm_sum_gbps));
  call.terms.push_back(moved("GPU memory", summed + 3 * traffic.items_held * row, &Rates::hbm_gbps));
  return call;
}

/// One message to each far rank: packed by kernels, sent by the driver, and read by kernels of that rank.
void Calls::add_messages(int num_messages, const FarTraffic::Call& sent, CallPlan* call) const {
  const double sent_bytes = sent.bytes;
  const double message_us = rates_.far_message_us.value;
  const bool in_host = shape_.rings == PlanRings::kHost;
  call->network_bytes = sent_bytes;
  if (!sent.small) call->terms.push_back(fixed("kernels, many tokens", rates_, &Rates::far_many_us));
  call->terms.push_back({"words over PCIe", 2 * rates_.far_word_us.value, 0, false, {&Rates::far_word_us}});
  call->terms.push_back({"driver, first message", 2 * message_us, 0, false, {&Rates::far_message_us}});
  call->terms.push_back({"network, first message", rates_.network_us.value, 0, false, {&Rates::network_us}});
  if (!in_host && !sent.words) {
    // The answer to a flush, and the number behind the rows (docs/transport.md).
    call->terms.push_back({"order of writes", 2 * rates_.network_us.value, 0, false, {&Rates::network_us}});
  }
  Rate Rates::*const rate = in_host ? &Rates::ring_gbps : &Rates::latency_gbps;
  Term copies = moved(in_host ? "PCIe, out and in" : "GPU memory, out and in", 2 * sent_bytes, rate);
  copies.overlaps = false;
  call->terms.push_back(copies);
  call->terms.push_back({"wire",
                         us_of(sent_bytes, network_gbps() * rates_.network_share.value),
                         sent_bytes,
                         true,
                         {&Rates::network_gbit, &Rates::network_share}});
  if (in_host) {
    call->terms.push_back(
        moved("host memory", kHostPasses * sent_bytes * shape_.ranks_per_node, &Rates::host_memory_gbps));
  }
  call->terms.push_back(
      {"driver, other messages", 2 * (num_messages - 1) * message_us, 0, false, {&Rates::far_message_us}});
}

CallPlan Calls::latency_dispatch() const {
  CallPlan call{"latency-dispatch", {}, 0, 0};
  const auto row = static_cast<double>(latency_row_bytes(shape_).dispatch);
  const Traffic traffic = traffic_of(shape_, shape_.latency_tokens, latency_row_bytes(shape_).dispatch);
  call.link_bytes = near_share() * traffic.rows_over_links * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::latency_dispatch_us));
  Term rows = moved("NVLink and slab", call.link_bytes, &Rates::latency_gbps);
  rows.overlaps = false;
  call.terms.push_back(rows);
  if (one_node()) return call;
  call.terms.push_back(fixed("kernels for far ranks", rates_, &Rates::far_dispatch_us));
  const FarTraffic far = far_traffic_of(shape_);
  add_messages(far.num_messages, far.dispatch, &call);
  return call;
}

CallPlan Calls::latency_combine() const {
  CallPlan call{"latency-combine", {}, 0, 0};
  const auto row = static_cast<double>(latency_row_bytes(shape_).combine);
  const Traffic traffic = traffic_of(shape_, shape_.latency_tokens, latency_row_bytes(shape_).combine);
  const bool sums = shape_.order == CombineOrder::kRankSums;
  const int peers = shape_.ranks_per_node - 1;
  const double rows = sums ? traffic.rows_over_links : traffic.entries * peers / shape_.ranks_per_node;
  call.link_bytes = near_share() * rows * row;
  call.terms.push_back(fixed("entry and end", rates_, &Rates::latency_combine_us));
  const FarTraffic far = far_traffic_of(shape_);
  const bool words = sums && one_node() && shape_.latency_tokens <= kMostWordTokens;
  if (!words && !far.combine.small) call.terms.push_back(fixed("fence and flags", rates_, &Rates::latency_flags_us));
  if (words) call.link_bytes *= word_share();
  Term moved_rows = moved("NVLink", call.link_bytes, &Rates::latency_gbps);
  moved_rows.overlaps = false;
  call.terms.push_back(moved_rows);
  if (one_node()) return call;
  call.terms.push_back(fixed("kernels for far ranks", rates_, &Rates::far_combine_us));
  add_messages(far.num_messages, far.combine, &call);
  return call;
}

}  // namespace

double CallPlan::time_us() const {
  double sum = 0;
  double longest = 0;
  for (const Term& term : terms) {
    if (term.overlaps) {
      longest = std::max(longest, term.us);
    } else {
      sum += term.us;
    }
  }
  return sum + longest;
}

const Term& CallPlan::limit() const {
  return *std::max_element(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.us < b.us; });
}

CallPlan plan_route(const PlanShape& shape, const Rates& rates) { return Calls(shape, rates).route(); }
CallPlan plan_dispatch(const PlanShape& shape, const Rates& rates) { return Calls(shape, rates).dispatch(); }
CallPlan plan_combine(const PlanShape& shape, const Rates& rates) { return Calls(shape, rates).combine(); }
CallPlan plan_latency_dispatch(const PlanShape& shape, const Rates& rates) {
  return Calls(shape, rates).latency_dispatch();
}
CallPlan plan_latency_combine(const PlanShape& shape, const Rates& rates) {
  return Calls(shape, rates).latency_combine();
}

CallPlan plan_latency_pair(const PlanShape& shape, const Rates& rates) {
  const CallPlan dispatch = plan_latency_dispatch(shape, rates);
  const CallPlan combine = plan_latency_combine(shape, rates);
  CallPlan pair{"latency-pair", {}, 0, 0};
  for (const CallPlan* call : {&dispatch, &combine}) {
    pair.network_bytes += call->network_bytes;
    pair.link_bytes += call->link_bytes;
    pair.terms.push_back({call->call, call->time_us(), 0, false, call->limit().rates});
  }
  return pair;
}

std::vector<CallPlan> plan_calls(const PlanShape& shape, const Rates& rates) {
  return {plan_route(shape, rates),           plan_dispatch(shape, rates),
          plan_combine(shape, rates),         plan_latency_dispatch(shape, rates),
          plan_latency_combine(shape, rates), plan_latency_pair(shape, rates)};
}

}  // namespace ferry::tools
