#include <fmt/format.h>

#include <cstring>

#include "cpu/combine_inputs.hpp"
#include "cpu/cpu_backend.hpp"
#include "cpu/cpu_routing.hpp"
#include "cpu/row_sum.hpp"
#include "plan/to_size.hpp"

/// Combine on one rank: each source reads the rows of its own tokens out of the peers' memory and sums them. Rows that
/// a peer cannot reach (ordinary pointers of another process) are staged in the arena before the call begins.

namespace ferry::cpu {
namespace {

class Combiner {
 public:
  Combiner(const CombineCall& call, Crew& crew, Staging& staging)
      : call_(call), routing_(static_cast<const CpuRouting&>(*call.routing)), crew_(crew), staging_(staging) {}

  /// Stage what peers cannot reach; fills the ticket's locations.
  Status prepare(Ticket& ticket);
  /// After all tickets are in: sum, and wait until nobody reads this rank's rows any more.
  Status run();

 private:
  Status find_peers();
  void sum_tokens() const;
  void sum_weights() const;

  /// Where a rank's rows and returned weights are, for this rank.
  struct Sender {
    const std::byte* rows = nullptr;
    std::int64_t stride_bytes = 0;
    const float* weights = nullptr;
  };

  const CombineCall& call_;
  const CpuRouting& routing_;
  Crew& crew_;
  Staging& staging_;
  std::vector<Sender> senders_;  // by rank
};

Status Combiner::prepare(Ticket& ticket) {
  const node::Location rows = crew_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  bool reachable = true;
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    if (routing_.num_rows_from_rank[to_size(rank)] > 0 && !crew_.reachable(rows, rank)) reachable = false;
  }
  return publish_combine_inputs(call_, routing_, crew_, staging_, reachable, ticket);
}

Status Combiner::find_peers() {
  senders_.resize(to_size(crew_.num_ranks()));
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0) continue;
    const Ticket& ticket = crew_.ticket_of(rank);
    Sender& sender = senders_[to_size(rank)];
    const std::int64_t num_rows = routing_.num_rows_on_rank[to_size(rank)];
    sender.rows = crew_.resolve(ticket.input, rank, {num_rows, call_.x.row_bytes});
    sender.stride_bytes = ticket.input.stride_bytes;
    if (call_.weights.present()) {
      const std::int64_t weights_per_row = routing_.layout == Layout::kTokens ? routing_.num_topk : 1;
      const auto weights_bytes = num_rows * weights_per_row * static_cast<std::int64_t>(sizeof(float));
      sender.weights = reinterpret_cast<const float*>(crew_.resolve(ticket.records, rank, {1, weights_bytes}));
    }
    if (sender.rows == nullptr || (call_.weights.present() && sender.weights == nullptr)) {
      return crew_.fail(ErrorCode::kInternal, rank,
                        fmt::format("combine: rank {} named memory outside its arena; please report this bug", rank));
    }
  }
  return {};
}

void Combiner::sum_tokens() const {
  const RowSumFunction sum_row = choose_row_sum(call_.x.dtype);
  const auto* weight_table = static_cast<const float*>(call_.topk_weights.data);
  std::vector<const std::byte*> rows;
  std::vector<float> weights;
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    rows.clear();
    weights.clear();
    for (const ConstRows& bias : call_.bias) {
      if (!bias.present()) continue;
      rows.push_back(bias.row(token));
      weights.push_back(1.0F);  // fma(1, b, acc) is acc + b
    }
    const auto begin = to_size(routing_.first_place[to_size(token)]);
    const auto end = to_size(routing_.first_place[to_size(token) + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      const Place& place = routing_.places[i];
      if (!call_.weighted && !place.first) continue;
      const Sender& sender = senders_[static_cast<std::size_t>(place.rank)];
      rows.push_back(sender.rows + place.row * sender.stride_bytes);
      if (call_.weighted) weights.push_back(weight_table[token * routing_.num_topk + place.topk]);
    }
    sum_row({rows.data(), call_.weighted ? weights.data() : nullptr, rows.size(), call_.out_x.row(token),
             to_size(call_.out_x.row_bytes)});
  }
}

void Combiner::sum_weights() const {
  if (!call_.weights.present()) return;
  auto* out = static_cast<float*>(call_.out_weights.data);
  const auto num_topk = to_size(routing_.num_topk);
  for (std::size_t token = 0; token < to_size(routing_.num_tokens); ++token, out += num_topk) {
    std::fill_n(out, num_topk, 0.0F);
    const auto begin = to_size(routing_.first_place[token]);
    const auto end = to_size(routing_.first_place[token + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      const Place& place = routing_.places[i];
      const float* weights = senders_[static_cast<std::size_t>(place.rank)].weights;
      if (routing_.layout != Layout::kTokens) {
        out[place.topk] = weights[place.row];
      } else if (place.first) {
        const float* row = weights + to_size(place.row) * num_topk;
        for (std::size_t topk = 0; topk < num_topk; ++topk) out[topk] += row[topk];
      }
    }
  }
}

Status Combiner::run() {
  if (Status status = find_peers(); !status.ok()) return status;
  sum_tokens();
  sum_weights();
  crew_.post(Phase::kDone);
  return crew_.wait(Phase::kDone);
}

}  // namespace

Status CpuBackend::run_combine(const CombineCall& call) {
  if (!crew_.broken().ok()) return crew_.broken();
  Ticket ticket;
  ticket.record = call.record;
  if (call.record.code != ErrorCode::kOk) return crew_.begin(ticket);
  Combiner combiner(call, crew_, staging_);
  if (Status status = combiner.prepare(ticket); !status.ok()) ticket.record.set_status(status);
  if (Status status = crew_.begin(ticket); !status.ok()) return status;
  return combiner.run();
}

}  // namespace ferry::cpu
