#include "ferry/membership.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>

#include "bootstrap/tcp_bootstrap.hpp"
#include "core/descriptors.hpp"
#include "ferry/version.hpp"
#include "membership/endpoint.hpp"
#include "membership/founding.hpp"
#include "membership/joining.hpp"
#include "membership/view_change.hpp"
#include "membership/view_watch.hpp"

namespace ferry {
namespace {

using membership::Endpoint;
using membership::Id;
using membership::Member;
using membership::View;

MembershipView describe(const View& view, const View* before, const Member& self) {
  MembershipView described;
  described.epoch = view.epoch;
  described.rank = -1;
  described.num_complete_steps = view.num_complete_steps;
  for (const Member& member : view.members) {
    if (member.is_same_process(self)) described.rank = described.num_ranks();
    described.ids.push_back(member.id);
    const Member* earlier = before != nullptr ? before->find(member.id) : nullptr;
    if (before != nullptr && (earlier == nullptr || !earlier->is_same_process(member))) {
      described.joined_ids.push_back(member.id);
    }
  }
  if (before == nullptr) return described;
  for (std::size_t rank = 0; rank < before->members.size(); ++rank) {
    const Member& member = before->members[rank];
    const Member* later = view.find(member.id);
    if (later != nullptr && later->is_same_process(member)) {
      described.kept_ranks.push_back(static_cast<int>(rank));
    } else {
      described.lost_ids.push_back(member.id);
    }
  }
  return described;
}

}  // namespace

class Membership::State {
 public:
  State(membership::Founded founded, std::int64_t timeout_ns, std::function<bool()> interrupted)
      : founded_(std::move(founded)),
        timeout_ns_(timeout_ns),
        interrupted_(std::move(interrupted)),
        described_(describe(founded_.view, nullptr, founded_.self)) {}

  const MembershipView& view() const { return described_; }
  std::string address() const { return membership::address_of(founded_.self); }

  void complete_steps(std::uint64_t num_steps) {
    const std::lock_guard lock(mutex_);
    num_complete_steps_ = num_steps;
    serve();
  }
  int num_waiting() {
    const std::lock_guard lock(mutex_);
    serve();
    return static_cast<int>(joiners_.size());
  }
  int num_awaiting() {
    const std::lock_guard lock(mutex_);
    serve();
    return static_cast<int>(std::ranges::count_if(early_, asks_for_next_view));
  }
  Result<MembershipView> next_view(const NextViewOptions& options);
  Result<std::shared_ptr<Bootstrap>> bootstrap();

 private:
  struct Joiner {
    Endpoint::Key key = 0;
    Member member{};
  };

  static bool asks_for_next_view(const Endpoint::Arrival& arrival) {
    return std::holds_alternative<membership::Report>(arrival.letter->content);
  }
  void serve();
  /// Whether to go on with a bootstrap.
  Status keep_watch(membership::ViewWatch& watch);
  void sort(std::vector<Endpoint::Arrival> arrivals);
  membership::Report make_report(const NextViewOptions& options) const;
  void answer_joiners(const View& view);
  Status left_out() const;

  std::mutex mutex_;
  membership::Founded founded_;
  std::int64_t timeout_ns_;
  std::function<bool()> interrupted_;
  MembershipView described_;
  std::uint64_t num_complete_steps_ = 0;
  std::vector<Joiner> joiners_;
  std::vector<Endpoint::Arrival> early_;  // of members that are in next_view already
  bool is_out_ = false;
  bool has_left_ = false;
  /// Memory of attempts on the next view that this member gave up: others may have decided one that it acknowledged.
  membership::AgreementMemory memory_;
  std::optional<Result<std::shared_ptr<Bootstrap>>> bootstrap_;
};

void Membership::State::serve() {
  std::vector<Endpoint::Arrival> arrivals;
  // A listening socket that fails now fails again in next_view, which reports it.
  static_cast<void>(founded_.endpoint->serve_now(&arrivals));
  sort(std::move(arrivals));
}

/// Keeps letters for the next change of the view, and answers those of members that were left out of this one.
void Membership::State::sort(std::vector<Endpoint::Arrival> arrivals) {
  for (Endpoint::Arrival& arrival : arrivals) {
    if (!arrival.letter) {
      std::erase_if(joiners_, [&](const Joiner& joiner) { return joiner.key == arrival.key; });
      std::erase_if(early_, [&](const Endpoint::Arrival& early) { return early.key == arrival.key; });
    } else if (const auto* join = std::get_if<membership::Join>(&arrival.letter->content)) {
      joiners_.push_back({arrival.key, join->member});
      answer_joiners(founded_.view);  // it may be in already, and not know because the member that it asked has ended
    } else if (arrival.letter->view.epoch < founded_.view.epoch) {
      founded_.endpoint->send(arrival.key, founded_.view, membership::Decision{founded_.view});
      founded_.endpoint->dismiss(arrival.key);
    } else {
      early_.push_back(std::move(arrival));
    }
  }
}

Status Membership::State::left_out() const {
  if (has_left_) {
    return Status(ErrorCode::kPeerLost, "Membership: this process has left; join the others with Membership::join");
  }
  return Status(ErrorCode::kPeerLost,
                fmt::format("Membership::next_view: the others have left this process (id {}) out of view {}, because "
                            "it did not come in time; join them anew with Membership::join, or end it",
                            founded_.self.id, founded_.view.epoch),
                described_.rank);
}

membership::Report Membership::State::make_report(const NextViewOptions& options) const {
  membership::Report report;
  report.num_complete_steps = num_complete_steps_;
  report.leaves = options.leave;
  const int accused = options.reason.code() == ErrorCode::kTimeout ? options.reason.peer() : -1;
  if (accused >= 0 && accused < described_.num_ranks() && accused != described_.rank) {
    report.accused.push_back(described_.ids[static_cast<std::size_t>(accused)]);
  }
  for (const int id : options.silent_ids) {
    const bool is_member = std::ranges::binary_search(described_.ids, id);
    if (is_member && id != founded_.self.id) report.accused.push_back(id);
  }
  for (const Joiner& joiner : joiners_) report.joiners.push_back(joiner.member);
  return report;
}

Status Membership::State::keep_watch(membership::ViewWatch& watch) {
  // Members that have not learned of this view ask those that have.
  serve();
  const auto asking = std::ranges::find_if(early_, asks_for_next_view);
  if (asking != early_.end()) {
    return Status(ErrorCode::kPeerLost,
                  fmt::format("Membership::bootstrap: the member with id {} asks for the next view; call next_view",
                              asking->from));
  }
  if (interrupted_ && interrupted_()) {
    return Status(ErrorCode::kPeerLost, "Membership::bootstrap: told to give up by MembershipOptions::interrupted",
                  described_.rank);
  }
  return watch.check();
}

void Membership::State::answer_joiners(const View& view) {
  std::erase_if(joiners_, [&](const Joiner& joiner) {
    const bool is_in = std::ranges::any_of(view.members, [&](const Member& member) {
      return member.port == joiner.member.port && member.host == joiner.member.host;
    });
    if (!is_in) return false;
    founded_.endpoint->send(joiner.key, view, membership::Decision{view});
    founded_.endpoint->dismiss(joiner.key);
    return true;
  });
}

Result<MembershipView> Membership::State::next_view(const NextViewOptions& options) {
  const std::lock_guard lock(mutex_);
  if (is_out_) return left_out();
  serve();
  membership::Agreement agreement(founded_.view, founded_.self.id, make_report(options), memory_);
  membership::ViewChange change({.endpoint = *founded_.endpoint,
                                 .secret = founded_.secret,
                                 .current = founded_.view,
                                 .self = founded_.self.id,
                                 .rank = described_.rank,
                                 .agreement = agreement,
                                 .timeout_ns = timeout_ns_,
                                 .interrupted = interrupted_});
  Result<View> next = change.run(std::exchange(early_, {}));
  memory_ = agreement.memory();
  if (!next.ok()) {
    sort(change.take_later());
    return next.status();
  }
  memory_ = {};
  bootstrap_.reset();
  answer_joiners(*next);
  const View before = std::exchange(founded_.view, std::move(*next));
  MembershipView described = describe(founded_.view, &before, founded_.self);
  sort(change.take_later());
  is_out_ = described.rank < 0;
  has_left_ = is_out_ && options.leave;
  if (is_out_ && !has_left_) return left_out();
  described_ = std::move(described);
  num_complete_steps_ = founded_.view.num_complete_steps;
  return described_;
}

Result<std::shared_ptr<Bootstrap>> Membership::State::bootstrap() {
  const std::lock_guard lock(mutex_);
  if (is_out_) return left_out();
  if (bootstrap_) return *bootstrap_;
  const Member& root = founded_.view.members.front();
  TcpBootstrapOptions options;
  options.rank = described_.rank;
  options.num_ranks = described_.num_ranks();
  options.host = root.host;
  options.port = root.bootstrap_port;
  options.secret = fmt::format("{} in view {}", founded_.secret, founded_.view.epoch);
  options.timeout_ns = timeout_ns_;
  if (options.rank == 0) {
    options.listen_fd = fcntl(founded_.bootstrap_listener.get(), F_DUPFD_CLOEXEC, 0);
    if (options.listen_fd < 0) {
      return Status(ErrorCode::kSystem, fmt::format("Membership::bootstrap: {}", describe_descriptor_limit(errno, 1)),
                    options.rank);
    }
  }
  membership::ViewWatch watch(founded_.view, founded_.self,
                              {static_cast<std::uint32_t>(founded_.self.id), founded_.secret});
  bootstrap_.emplace(bootstrap::create_tcp_bootstrap_as(options, version(), [&] { return keep_watch(watch); }));
  return *bootstrap_;
}

Membership::Membership(std::unique_ptr<State> state) : state_(std::move(state)) {}
Membership::~Membership() = default;

Result<std::shared_ptr<Membership>> Membership::create(std::shared_ptr<Bootstrap> bootstrap,
                                                       const MembershipOptions& options) {
  Result<membership::Founded> founded = membership::found(bootstrap.get(), options);
  if (!founded.ok()) return founded.status();
  return std::shared_ptr<Membership>(
      new Membership(std::make_unique<State>(std::move(*founded), options.timeout_ns, options.interrupted)));
}

Result<std::shared_ptr<Membership>> Membership::join(const JoinOptions& options) {
  Result<membership::Founded> founded = membership::join(options);
  if (!founded.ok()) return founded.status();
  return std::shared_ptr<Membership>(
      new Membership(std::make_unique<State>(std::move(*founded), options.timeout_ns, options.interrupted)));
}

const MembershipView& Membership::view() const { return state_->view(); }
std::string Membership::address() const { return state_->address(); }
void Membership::complete_steps(std::uint64_t num_steps) { state_->complete_steps(num_steps); }
int Membership::num_waiting() { return state_->num_waiting(); }
int Membership::num_awaiting() { return state_->num_awaiting(); }
Result<MembershipView> Membership::next_view(const NextViewOptions& options) { return state_->next_view(options); }
Result<std::shared_ptr<Bootstrap>> Membership::bootstrap() { return state_->bootstrap(); }

}  // namespace ferry
