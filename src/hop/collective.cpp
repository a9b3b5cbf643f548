#include "hop/collective.hpp"

#include <fmt/format.h>

#include <utility>

namespace ferry::hop {
namespace {

using node::Phase;

/// Done when all rail peers have said what they call.
class NoticesTask final : public node::Task {
 public:
  NoticesTask(const Rails& rails, std::uint64_t call, std::string_view operation)
      : rails_(rails), call_(call), operation_(operation) {}

  Step step() override {
    for (int node = 0; node < rails_.num_nodes(); ++node) {
      if (!rails_.heard(node, call_)) return Step::kIdle;
    }
    return Step::kDone;
  }
  void list_missing(std::vector<int>* ranks) override {
    for (int node = 0; node < rails_.num_nodes(); ++node) {
      if (!rails_.heard(node, call_)) ranks->push_back(rails_.rank_of(node));
    }
  }
  std::string describe() const override {
    return fmt::format("{} (call {}): waited for it to make the same call", operation_, call_);
  }

 private:
  const Rails& rails_;
  std::uint64_t call_;
  std::string_view operation_;
};

class ExchangeTask final : public node::Task {
 public:
  struct Names {
    std::string_view operation;
    std::uint64_t call;
  };
  ExchangeTask(node::Crew& crew, Rails& rails, std::vector<Flow> flows, const Collective::Items& items, Names names)
      : crew_(crew), exchange_(rails, std::move(flows)), items_(items), names_(names) {}

  Step step() override {
    const bool sent = exchange_.send(items_.write);
    const bool used = items_.use(exchange_);
    if (!exchange_.fault().ok()) {
      (void)crew_.fail(
          exchange_.fault().code(), exchange_.fault().peer(),
          fmt::format("{}: {}; do all ranks run the same build?", names_.operation, exchange_.fault().message()));
      return Step::kIdle;
    }
    if (sent || used) return Step::kMoved;
    if (busy_ && items_.meanwhile) {
      busy_ = items_.meanwhile();
      return Step::kMoved;
    }
    return exchange_.all_sent() && exchange_.all_used() ? Step::kDone : Step::kIdle;
  }
  void list_missing(std::vector<int>* ranks) override { exchange_.list_missing(ranks); }
  std::string describe() const override {
    return fmt::format("{} (call {}): waited for it {}", names_.operation, names_.call, items_.waiting_for);
  }

 private:
  node::Crew& crew_;
  RailExchange exchange_;
  const Collective::Items& items_;
  Names names_;
  bool busy_ = true;
};

}  // namespace

Status Collective::begin(node::Ticket ticket) {
  if (!crew_.broken().ok()) return crew_.broken();
  operation_ = to_string(ticket.record.operation);
  const std::uint64_t call = crew_.call() + 1;
  ticket.rails = rails_.notices(call);
  const CallNotice notice{call, ticket.record, ticket.max_recv_rows, ticket.num_entries};
  {
    const Rails::OwnHands hands(rails_);
    // The network first: it is the longer way.
    rails_.announce(notice);
    if (Status status = crew_.open(ticket); !status.ok()) return status;
    NoticesTask notices(rails_, call, operation_);
    if (Status status = crew_.run(notices); !status.ok()) return status;
  }
  rails_.publish_notices(call);
  crew_.post(Phase::kRails);
  if (Status status = crew_.wait(Phase::kRails); !status.ok()) return status;
  return collect();
}

Status Collective::collect() {
  const Topology& topology = rails_.topology();
  const auto num_ranks = static_cast<std::size_t>(topology.num_ranks);
  std::vector<const CallRecord*> records(num_ranks);
  said_.assign(num_ranks, {});
  notices_.resize(num_ranks);
  for (int mate = crew_.first_rank(); mate < crew_.end_rank(); ++mate) {
    const node::Location& location = crew_.ticket_of(mate).rails;
    const std::byte* const notices = crew_.resolve(location, mate, {topology.num_nodes(), sizeof(CallNotice)});
    if (notices == nullptr) {
      return crew_.fail(
          ErrorCode::kInternal, mate,
          fmt::format("{}: rank {} named memory outside its arena; please report this bug", operation_, mate));
    }
    for (int node = 0; node < topology.num_nodes(); ++node) {
      const auto rank = static_cast<std::size_t>(node * topology.ranks_per_node + topology.rail_of(mate));
      if (node == rails_.node()) {
        // Out of its ticket: no peer can put anything there.
        const node::Ticket& ticket = crew_.ticket_of(mate);
        records[rank] = &ticket.record;
        said_[rank] = {ticket.max_recv_rows, ticket.num_entries};
        continue;
      }
      const std::span<const std::byte, sizeof(CallNotice)> bytes(notices + node * location.stride_bytes,
                                                                 sizeof(CallNotice));
      if (Status status = parse_call_notice(bytes, crew_.call(), &notices_[rank]); !status.ok()) {
        return crew_.fail(
            status.code(), static_cast<int>(rank),
            fmt::format("{}: rank {} {}; do all ranks run the same build?", operation_, rank, status.message()));
      }
      records[rank] = &notices_[rank].record;
      said_[rank] = {notices_[rank].max_recv_rows, notices_[rank].num_entries};
    }
  }
  return check_agreement(records);
}

Status Collective::exchange(std::vector<Flow> flows, const Items& items) {
  const Rails::OwnHands hands(rails_);
  ExchangeTask task(crew_, rails_, std::move(flows), items, {operation_, crew_.call()});
  return crew_.run(task);
}

}  // namespace ferry::hop
