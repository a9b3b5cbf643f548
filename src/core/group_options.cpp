#include "core/group_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/choose.hpp"
#include "core/create_together.hpp"
#include "core/log.hpp"
#include "core/present_ranks.hpp"
#include "core/rank_host.hpp"
#include "ferry/version.hpp"

namespace ferry {
namespace {

/// Shorter deadlines cannot distinguish a busy rank from a dead one; longer ones overflow clock arithmetic.
constexpr std::int64_t kMinTimeoutNs = 1'000'000;
constexpr std::int64_t kMaxTimeoutNs = 24 * 3600 * kNsPerSecond;

/// Largest number of ranks of a group: a rank is stored in 16 bits next to each slot.
constexpr int kMaxRanks = 32767;

constexpr const char* kRingMemoryVariable = "FERRY_RING_MEMORY";
constexpr const char* kReservedSmsVariable = "FERRY_RESERVED_SMS";
constexpr const char* kNetworkPollVariable = "FERRY_NETWORK_POLL";

Status invalid_options(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "Group::create: " + std::move(message));
}

/// Memory of the rings: GroupOptions::ring_memory, or the variable if that is "auto".
Result<std::string> ring_memory_of(const GroupOptions& options) {
  const char* variable = options.ring_memory == "auto" ? std::getenv(kRingMemoryVariable) : nullptr;
  const bool from_variable = variable != nullptr && *variable != '\0';
  std::string wanted = from_variable ? variable : options.ring_memory;
  if (wanted == "auto" || wanted == "host" || wanted == "gpu") return wanted;
  return invalid_options(fmt::format("{} is \"{}\", expected \"auto\", \"host\" or \"gpu\"",
                                     from_variable ? kRingMemoryVariable : "GroupOptions::ring_memory", wanted));
}

/// GroupOptions::num_reserved_sms, or the variable if that is the default.
Result<int> reserved_sms_of(const GroupOptions& options) {
  if (options.num_reserved_sms < kDefaultReservedSms) {
    return invalid_options(
        fmt::format("GroupOptions::num_reserved_sms is {}, expected a number of multiprocessors, or {} for the default",
                    options.num_reserved_sms, kDefaultReservedSms));
  }
  const char* variable = options.num_reserved_sms == kDefaultReservedSms ? std::getenv(kReservedSmsVariable) : nullptr;
  if (variable == nullptr || *variable == '\0') return options.num_reserved_sms;
  const std::string_view text(variable);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 0) return value;
  return invalid_options(fmt::format("the variable {} is \"{}\", expected a number of multiprocessors, 0 for none",
                                     kReservedSmsVariable, text));
}

/// GroupOptions::network_poll_ns, or the variable or a second if that is the default.
Result<std::int64_t> network_poll_of(const GroupOptions& options) {
  constexpr std::int64_t kUsual = kNsPerSecond;
  if (options.network_poll_ns != kDefaultNetworkPoll) {
    const bool is_time = options.network_poll_ns > 0 && options.network_poll_ns <= kMaxTimeoutNs;
    if (is_time || options.network_poll_ns == kAlwaysPoll) return options.network_poll_ns;
    return invalid_options(
        fmt::format("GroupOptions::network_poll_ns is {}, expected 1 to {} nanoseconds, {} for always, or {} for the "
                    "default",
                    options.network_poll_ns, kMaxTimeoutNs, kAlwaysPoll, kDefaultNetworkPoll));
  }
  const char* variable = std::getenv(kNetworkPollVariable);
  if (variable == nullptr || *variable == '\0') return kUsual;
  const std::string_view text(variable);
  if (text == "always") return kAlwaysPoll;
  constexpr std::int64_t kMaxSeconds = kMaxTimeoutNs / kNsPerSecond;
  std::int64_t seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (is_number && seconds > 0 && seconds <= kMaxSeconds) return seconds * kNsPerSecond;
  return invalid_options(fmt::format("the variable {} is \"{}\", expected 1 to {} seconds, or \"always\"",
                                     kNetworkPollVariable, text, kMaxSeconds));
}

Status check_options(const GroupOptions& options, int rank, int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return invalid_options(
        fmt::format("the bootstrap reports rank {} of {}, expected a rank below the count and 1 to {} ranks", rank,
                    num_ranks, kMaxRanks));
  }
  const bool is_of_hosts = options.ranks_per_node == 0 || options.ranks_per_node == kDividedHosts;
  if (!is_of_hosts && (options.ranks_per_node < 0 || num_ranks % options.ranks_per_node != 0)) {
    return invalid_options(
        fmt::format("ranks_per_node is {}, expected 0 (the ranks of each host), {} (kDividedHosts) or a divisor of the "
                    "{} ranks",
                    options.ranks_per_node, kDividedHosts, num_ranks));
  }
  if (options.timeout_ns < kMinTimeoutNs || options.timeout_ns > kMaxTimeoutNs) {
    return invalid_options(fmt::format("timeout_ns is {}, expected {} to {} nanoseconds", options.timeout_ns,
                                       kMinTimeoutNs, kMaxTimeoutNs));
  }
  if (Status log = open_log(); !log.ok()) return log;
  if (Result<std::string> ring_memory = ring_memory_of(options); !ring_memory.ok()) return ring_memory.status();
  if (Result<int> reserved = reserved_sms_of(options); !reserved.ok()) return reserved.status();
  if (Result<std::int64_t> poll = network_poll_of(options); !poll.ok()) return poll.status();
  const int level = options.network_service_level;
  if (level != kDefaultServiceLevel && (level < 0 || level > kMaxServiceLevel)) {
    return invalid_options(fmt::format("network_service_level is {}, expected 0 to {}, or {} for the network's choice",
                                       level, kMaxServiceLevel, kDefaultServiceLevel));
  }
  if (options.network_paths < 0 || options.network_paths > kMaxNetworkPaths) {
    return invalid_options(fmt::format("network_paths is {}, expected 1 to {}, or 0 for the network's choice",
                                       options.network_paths, kMaxNetworkPaths));
  }
  if (options.mask_timeout_ns < kMinTimeoutNs || options.mask_timeout_ns > kMaxTimeoutNs) {
    return invalid_options(fmt::format("mask_timeout_ns is {}, expected {} to {} nanoseconds", options.mask_timeout_ns,
                                       kMinTimeoutNs, kMaxTimeoutNs));
  }
  return {};
}

/// Returns the same on every rank.
Status check_one_node(const GroupOptions& options, const Topology& topology) {
  if (topology.num_nodes() == 1) return {};
  if (options.mask_lost_ranks) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: mask_lost_ranks is set and the {} ranks are on {} nodes; ranks are masked "
                    "on one node only, clear the option and create a new group when a rank is lost",
                    topology.num_ranks, topology.num_nodes()));
  }
  if (!has_absent_ranks(options)) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("Group::create: {} of {} ranks are present and the ranks are on {} nodes; only groups of one "
                  "node have absent ranks, create a group of those that are present",
                  options.present_ranks.size(), topology.num_ranks, topology.num_nodes()));
}

/// Options that must be equal on all ranks, as lines "name=value", so that a message can name the first difference.
std::string describe_options(const GroupOptions& options, int num_ranks, std::string_view backend,
                             std::string_view ring_memory) {
  return fmt::format(
      "library version={}\nnum_ranks={}\nbackend={}\nranks_per_node={}\ntimeout_ns={}\ntransport={}\nlatency_bytes={}\n"
      "mask_lost_ranks={}\nmask_timeout_ns={}\nring_memory={}\nverify={}\npresent_ranks=[{}]\n",
      version(), num_ranks, backend, options.ranks_per_node, options.timeout_ns, options.transport,
      options.latency_bytes, options.mask_lost_ranks, options.mask_timeout_ns, ring_memory, options.verify,
      fmt::join(options.present_ranks, ", "));
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// Message of a rank: the lines above, a zero, and its RankHost.
std::vector<std::byte> to_message(const std::string& lines, int rank) {
  const RankHost host = RankHost::here(rank);
  const auto text = std::as_bytes(std::span(lines.c_str(), lines.size() + 1));
  const auto place = std::as_bytes(std::span(&host, 1));
  std::vector<std::byte> message(text.begin(), text.end());
  message.insert(message.end(), place.begin(), place.end());
  return message;
}

std::string_view text_of(std::span<const std::byte> message) {
  const auto end = std::ranges::find(message, std::byte{0});
  return {reinterpret_cast<const char*>(message.data()), static_cast<std::size_t>(end - message.begin())};
}

Status compare_options(const std::vector<std::vector<std::byte>>& all) {
  std::size_t lowest = 0;
  while (all[lowest].empty()) ++lowest;  // absent ranks
  const std::vector<std::string_view> first = lines_of(text_of(all[lowest]));
  for (std::size_t rank = lowest + 1; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const std::vector<std::string_view> lines = lines_of(text_of(all[rank]));
    for (std::size_t i = 0; i < std::max(first.size(), lines.size()); ++i) {
      const std::string_view a = i < first.size() ? first[i] : "nothing";
      const std::string_view b = i < lines.size() ? lines[i] : "nothing";
      if (a == b) continue;
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("Group::create: ranks disagree: rank {} has {}, rank {} has {}; it must be the same on every "
                      "rank",
                      lowest, a, rank, b),
          static_cast<int>(rank));
    }
  }
  return {};
}

/// An absent rank counts as one of this process: it will be on this host.
Result<std::vector<RankHost>> hosts_of(const std::vector<std::vector<std::byte>>& all) {
  std::vector<RankHost> hosts(all.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) {
      hosts[rank] = RankHost::here(static_cast<int>(rank));
      continue;
    }
    const std::size_t begin = text_of(all[rank]).size() + 1;
    if (all[rank].size() != begin + sizeof(RankHost)) {
      return Status(ErrorCode::kTransport,
                    fmt::format("Group::create: rank {} sent {} bytes, expected {}; run the same build on every rank",
                                rank, all[rank].size(), begin + sizeof(RankHost)),
                    static_cast<int>(rank));
    }
    std::memcpy(&hosts[rank], all[rank].data() + begin, sizeof(RankHost));
    if (hosts[rank].rank == static_cast<std::int64_t>(rank)) continue;
    return Status(
        ErrorCode::kTransport,
        fmt::format("Group::create: the bootstrap's all_gather returned the message of rank {} at the index of rank "
                    "{}; it must return the messages of all ranks to every rank, in rank order",
                    hosts[rank].rank, rank),
        static_cast<int>(rank));
  }
  return hosts;
}

}  // namespace

std::int64_t time_to_agree_ns(std::int64_t timeout_ns) { return std::clamp(timeout_ns, kNsPerSecond, kMaxTimeoutNs); }

Result<AgreedOptions> agree_on_options(Bootstrap& bootstrap, const GroupOptions& options, const Status& my_status) {
  AgreedOptions agreed;
  agreed.topology.rank = bootstrap.rank();
  agreed.topology.num_ranks = bootstrap.num_ranks();
  Status status = my_status;
  if (status.ok()) status = check_options(options, bootstrap.rank(), bootstrap.num_ranks());
  if (status.ok()) {
    agreed.ring_memory = ring_memory_of(options).value();
    agreed.num_reserved_sms = reserved_sms_of(options).value();
    agreed.network_poll_ns = network_poll_of(options).value();
    Result<const BackendFactory*> factory =
        choose_factory("Group::create: backend", options.backend, backend_factories());
    status = factory.status();
    if (factory.ok()) agreed.factory = *factory;
  }
  if (status.ok()) {
    Result<std::vector<TuningTable>> tuning = load_tuning(options.tuning_file);
    status = tuning.status();
    if (tuning.ok()) agreed.tuning = std::move(*tuning);
  }
  const std::string text = describe_options(options, bootstrap.num_ranks(),
                                            agreed.factory ? agreed.factory->name : "none", agreed.ring_memory);
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(bootstrap, status, to_message(text, bootstrap.rank()), time_to_agree_ns(options.timeout_ns));
  if (!all.ok()) return all.status();
  if (Status compared = compare_options(*all); !compared.ok()) return compared;
  const Result<std::vector<RankHost>> hosts = hosts_of(*all);
  if (!hosts.ok()) return hosts.status();
  agreed.topology.ranks_per_node = options.ranks_per_node;
  if (options.ranks_per_node == kDividedHosts) agreed.topology.ranks_per_node = divide_hosts(*hosts);
  if (options.ranks_per_node == 0) {
    const Result<int> found = find_ranks_per_node(*hosts);
    if (!found.ok()) return found.status();
    agreed.topology.ranks_per_node = *found;
  }
  if (Status users = check_users(*hosts, agreed.topology.ranks_per_node); !users.ok()) return users;
  if (Status one_node = check_one_node(options, agreed.topology); !one_node.ok()) return one_node;
  return agreed;
}

}  // namespace ferry
