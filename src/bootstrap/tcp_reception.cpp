#include "bootstrap/tcp_reception.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "bootstrap/lobby.hpp"
#include "bootstrap/verdict.hpp"

namespace ferry::bootstrap {
namespace {

// How long rank 0 stays to tell latecomers why there will be no group. Launchers start the ranks of a job within
// seconds of each other; a rank that comes later finds nobody and times out.
constexpr std::int64_t kMaxLatecomerNs = 5 * kNsPerSecond;

class Reception {
 public:
  explicit Reception(ReceptionParams params);

  /// Fills all seats, or says why not.
  Status seat_everybody();
  Result<std::vector<Channel>> start_everybody();
  /// Tells all who have come and, where that is a disagreement, those who come a little later.
  void send_away(const Status& verdict);

  const Status& verdict() const { return verdict_; }

 private:
  struct Seat {
    std::optional<Channel> channel;
    Instance instance{};
    std::string address;
  };

  std::size_t num_ranks() const { return seats_.size(); }
  std::vector<bool> arrived() const;
  bool complete() const;
  Status missing() const;

  Status listen_to_seats(std::span<const pollfd> entries, std::span<const std::size_t> ranks);
  Status listen_to(Seat* seat, std::size_t rank);
  Status take_seat(Arrival arrival);
  Status find_disagreement(const Arrival& arrival) const;

  ReceptionParams params_;
  Deadline deadline_;
  Lobby lobby_;
  std::vector<Seat> seats_;  // [num_ranks]; rank 0's own stays empty
  /// Ranks whose hello was verified, and the largest group any of them believes in: who must hear a verdict.
  std::set<std::uint32_t> heard_from_;
  std::size_t largest_group_;
  std::vector<Channel> unseated_;  // disagree with the group, or claim a taken number
  Status verdict_;
};

// Strangers must not hold a place as long as the group waits.
std::int64_t handshake_ns(std::int64_t timeout_ns) { return std::min(kHandshakeNs, timeout_ns / 2); }

Reception::Reception(ReceptionParams params)
    : params_(std::move(params)),
      deadline_(Deadline::after(params_.timeout_ns)),
      lobby_({.listener = std::move(params_.listener),
              .secret = params_.secret,
              .num_ranks = params_.num_ranks,
              .handshake_ns = handshake_ns(params_.timeout_ns)}),
      seats_(static_cast<std::size_t>(params_.num_ranks)),
      largest_group_(seats_.size()) {}

std::vector<bool> Reception::arrived() const {
  std::vector<bool> arrived(num_ranks(), true);
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) arrived[rank] = seats_[rank].channel.has_value();
  return arrived;
}

bool Reception::complete() const {
  const std::vector<bool> here = arrived();
  return std::find(here.begin(), here.end(), false) == here.end();
}

Status Reception::missing() const {
  const Status status = missing_ranks("create_tcp_bootstrap", arrived(), params_.timeout_ns);
  if (lobby_.num_wrong_proofs() == 0) return status;
  return Status(status.code(),
                fmt::format("{}. {} connections came with another secret: give every rank the same one",
                            status.message(), lobby_.num_wrong_proofs()),
                status.peer());
}

Status Reception::seat_everybody() {
  while (!complete()) {
    if (deadline_.expired()) return missing();
    std::vector<pollfd> entries;
    lobby_.add_poll_entries(&entries);
    const std::size_t num_lobby_entries = entries.size();
    std::vector<std::size_t> ranks;
    for (std::size_t rank = 1; rank < num_ranks(); ++rank) {
      if (!seats_[rank].channel) continue;
      entries.push_back({seats_[rank].channel->fd(), seats_[rank].channel->poll_events(), 0});
      ranks.push_back(rank);
    }
    if (Status status = wait_until_ready(entries, lobby_.next_deadline(deadline_)); !status.ok()) return status;
    // Seats first: a rank that connects anew must find its old connection gone.
    const std::span<const pollfd> all(entries);
    if (Status status = listen_to_seats(all.subspan(num_lobby_entries), ranks); !status.ok()) return status;
    std::vector<Arrival> arrivals;
    if (Status status = lobby_.serve(all.first(num_lobby_entries), &arrivals); !status.ok()) return status;
    Status first_problem;
    for (Arrival& arrival : arrivals) {
      Status status = take_seat(std::move(arrival));
      if (first_problem.ok()) first_problem = status;
    }
    if (!first_problem.ok()) return first_problem;
  }
  return {};
}

Status Reception::listen_to_seats(std::span<const pollfd> entries, std::span<const std::size_t> ranks) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (entries[i].revents == 0) continue;
    if (Status status = listen_to(&seats_[ranks[i]], ranks[i]); !status.ok()) return status;
  }
  return {};
}

Status Reception::listen_to(Seat* seat, std::size_t rank) {
  // A rank that goes before the group exists may be started again, so its seat is free until the deadline.
  if (!seat->channel->flush()) {
    seat->channel.reset();
    return {};
  }
  Frame frame;
  switch (seat->channel->receive(&frame)) {
    case ReceiveOutcome::kWouldBlock:
      return {};
    case ReceiveOutcome::kClosed:
    case ReceiveOutcome::kBroken:
      seat->channel.reset();
      return {};
    case ReceiveOutcome::kFrame:
      break;
  }
  if (frame.type == FrameType::kGiveUp) return missing();
  return Status(ErrorCode::kTransport,
                fmt::format("create_tcp_bootstrap: rank {} sent a frame of type {} before the group was formed", rank,
                            static_cast<int>(frame.type)),
                static_cast<int>(rank));
}

Status Reception::find_disagreement(const Arrival& arrival) const {
  const Hello& hello = arrival.hello;
  const int rank = static_cast<int>(hello.rank);
  if (hello.version != params_.version) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: ranks 0 and {} run different versions of the library: rank 0 has "
                              "{}, rank {} has {}; install the same on both",
                              hello.rank, params_.version, hello.rank, hello.version),
                  rank);
  }
  if (hello.num_ranks != num_ranks()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: ranks 0 and {} disagree on num_ranks: rank 0 has {}, rank {} has "
                              "{}; start all ranks with the same number",
                              hello.rank, num_ranks(), hello.rank, hello.num_ranks),
                  rank);
  }
  if (hello.rank == 0 || hello.rank >= num_ranks()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: {} connected as rank {}, expected 1 to {}", arrival.address,
                              hello.rank, num_ranks() - 1),
                  rank);
  }
  const Seat& seat = seats_[hello.rank];
  if (seat.channel && seat.instance != hello.instance) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: two processes claim to be rank {}: {} and {}; give every process "
                              "its own rank",
                              hello.rank, seat.address, arrival.address),
                  rank);
  }
  return {};
}

Status Reception::take_seat(Arrival arrival) {
  heard_from_.insert(arrival.hello.rank);
  largest_group_ = std::max<std::size_t>(largest_group_, arrival.hello.num_ranks);
  Status problem = find_disagreement(arrival);
  if (!problem.ok() || !verdict_.ok()) {
    unseated_.push_back(std::move(arrival.channel));
    return problem;
  }
  if (Status status = arrival.channel.queue(FrameType::kWelcome, {}); !status.ok()) return status;
  if (!arrival.channel.flush()) return {};
  Seat& seat = seats_[arrival.hello.rank];
  seat.channel.emplace(std::move(arrival.channel));
  seat.instance = arrival.hello.instance;
  seat.address = std::move(arrival.address);
  return {};
}

Result<std::vector<Channel>> Reception::start_everybody() {
  std::vector<Channel> channels;
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) {
    Channel channel = std::move(*seats_[rank].channel);
    if (Status status = channel.queue(FrameType::kStart, {}); !status.ok()) return status;
    // Less than a hundred bytes since the connection was made: they fit. A rank that is gone is noticed, and named, by
    // the first all-gather.
    (void)channel.flush();
    channels.push_back(std::move(channel));
  }
  return channels;
}

void Reception::send_away(const Status& verdict) {
  verdict_ = clip_text(verdict);
  const bool wait_for_latecomers = verdict_.code() == ErrorCode::kInvalidArgument;
  const Deadline told_by = Deadline::after(grace_ns(params_.timeout_ns));
  const Deadline latecomers_until = Deadline::after(std::min(kMaxLatecomerNs, params_.timeout_ns / 2));

  std::vector<Channel> told;
  for (Seat& seat : seats_) {
    if (seat.channel) told.push_back(std::move(*seat.channel));
    seat.channel.reset();
  }
  for (Channel& channel : unseated_) told.push_back(std::move(channel));
  unseated_.clear();
  const auto tell = [this](std::vector<Channel>* channels, Deadline until) {
    std::vector<Channel*> pointers;
    for (Channel& channel : *channels) pointers.push_back(&channel);
    part_with(pointers, std::vector<bool>(pointers.size(), true), verdict_, until);
  };
  tell(&told, told_by);

  while (wait_for_latecomers && heard_from_.size() + 1 < largest_group_ && !latecomers_until.expired()) {
    std::vector<pollfd> entries;
    lobby_.add_poll_entries(&entries);
    std::vector<Arrival> arrivals;
    if (!wait_until_ready(entries, lobby_.next_deadline(latecomers_until)).ok()) return;
    if (!lobby_.serve(entries, &arrivals).ok()) return;
    for (Arrival& arrival : arrivals) (void)take_seat(std::move(arrival));
    tell(&unseated_, latecomers_until);
    unseated_.clear();
  }
}

}  // namespace

Result<std::vector<Channel>> receive_ranks(ReceptionParams params) {
  Reception reception(std::move(params));
  const Status status = reception.seat_everybody();
  if (status.ok()) return reception.start_everybody();
  reception.send_away(status);
  return reception.verdict();
}

}  // namespace ferry::bootstrap
