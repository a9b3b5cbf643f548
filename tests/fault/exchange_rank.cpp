/// One rank of a group that exchanges small batches until a call fails, then leaves the group and, if told to,
/// continues in a new one. stop_rounds.py starts it, stops or kills it, and reads its events: one a line, fields
/// separated by tabs (print_event below lists them).
///
///   exchange_rank RANK NUM_RANKS RANKS_PER_NODE DEADLINE_MS FIRST_FD SECOND_FD
///
/// FIRST_FD and SECOND_FD are listening sockets that all ranks inherit: rank 0 of the first group and rank 0 of the
/// second use them for their bootstraps. FERRY_SECRET: the secret of both. Standard input gives the next step: "regroup
/// RANK NUM_RANKS RANKS_PER_NODE" or "exit" (also the end of the input).

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "fault/small_exchange.hpp"
#include "ferry/ferry.hpp"

namespace ferry::test {
namespace {

/// Long enough for a machine that runs several groups at once.
constexpr std::int64_t kBootstrapTimeoutNs = 60 * kNsPerSecond;
/// Rounds after which the second group counts as working.
constexpr int kNumRegroupedRounds = 3;

struct Place {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
};

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

/// Prints name, time in nanoseconds of the monotonic clock, error code, blamed rank and message.
void print_event(const char* name, const Status& status = {}) {
  fmt::print("{}\t{}\t{}\t{}\t{}\n", name, now_ns(), to_string(status.code()), status.peer(), status.message());
  std::fflush(stdout);
}

std::uint16_t port_of(int listen_fd) {
  sockaddr_in address{};
  socklen_t num_bytes = sizeof address;
  getsockname(listen_fd, reinterpret_cast<sockaddr*>(&address), &num_bytes);
  return ntohs(address.sin_port);
}

/// Takes ownership of `listen_fd`.
Result<std::shared_ptr<Group>> form_group(const Place& place, int listen_fd, std::int64_t deadline_ns) {
  const char* secret = std::getenv("FERRY_SECRET");
  TcpBootstrapOptions options{.rank = place.rank,
                              .num_ranks = place.num_ranks,
                              .port = port_of(listen_fd),
                              .secret = secret != nullptr ? secret : "",
                              .timeout_ns = kBootstrapTimeoutNs};
  if (place.rank == 0) {
    options.listen_fd = listen_fd;
  } else {
    close(listen_fd);
  }
  Result<std::shared_ptr<Bootstrap>> bootstrap = create_tcp_bootstrap(options);
  if (!bootstrap.ok()) return bootstrap.status();
  return Group::create(*bootstrap,
                       {.backend = "cpu", .ranks_per_node = place.ranks_per_node, .timeout_ns = deadline_ns});
}

/// Exchanges until a call fails or `num_rounds` are over, then leaves. Prints `first_event` after the first round.
void exchange(std::shared_ptr<Group> group, int num_rounds, const char* first_event) {
  Status status;
  for (int round = 0; status.ok() && round < num_rounds; ++round) {
    SmallExchange batch(*group, round % 2 == 0);
    status = batch.run_and_verify();
    if (status.ok() && round == 0) print_event(first_event);
  }
  if (!status.ok()) {
    print_event("failed", status);
  } else if (status = group->destroy(); !status.ok()) {
    print_event("failed", status);
  }
  group.reset();
  print_event("left");
}

int run(std::span<char*> arguments) {
  constexpr std::size_t kNumArguments = 7;
  if (arguments.size() != kNumArguments) return 2;
  const auto number = [&arguments](std::size_t idx) { return std::atoi(arguments[idx]); };
  const Place first{number(1), number(2), number(3)};
  const std::int64_t deadline_ns = number(4) * (kNsPerSecond / 1000);
  const int second_fd = number(6);
  Result<std::shared_ptr<Group>> group = form_group(first, number(5), deadline_ns);
  if (!group.ok()) {
    print_event("no_group", group.status());
    return 1;
  }
  exchange(std::exchange(*group, nullptr), std::numeric_limits<int>::max(), "ready");
  std::string line;
  std::getline(std::cin, line);
  std::istringstream words(line);
  std::string order;
  Place place;
  if (!(words >> order >> place.rank >> place.num_ranks >> place.ranks_per_node) || order != "regroup") return 0;
  group = form_group(place, second_fd, deadline_ns);
  if (!group.ok()) {
    print_event("no_group", group.status());
    return 1;
  }
  exchange(std::exchange(*group, nullptr), kNumRegroupedRounds, "regrouped");
  std::getline(std::cin, line);
  return 0;
}

}  // namespace
}  // namespace ferry::test

int main(int num_arguments, char** arguments) {
  return ferry::test::run({arguments, static_cast<std::size_t>(num_arguments)});
}
