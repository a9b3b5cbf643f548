#include "membership/founding.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/handshake.hpp"
#include "core/create_together.hpp"
#include "core/host_identity.hpp"
#include "membership/messages.hpp"

namespace ferry::membership {
namespace {

/// Shorter waits take a busy member for a lost one; longer ones overflow clock arithmetic.
constexpr std::int64_t kMinTimeoutNs = 1'000'000;
constexpr std::int64_t kMaxTimeoutNs = 24 * 3600 * kNsPerSecond;

/// Bytes of a secret that is drawn: as many as the digests that it makes.
constexpr std::size_t kSecretBytes = bootstrap::kDigestBytes;

/// A report has two views of some thirty bytes a member, and must fit into a frame (kMaxBootstrapMessageBytes).
constexpr int kMaxRanks = 8192;

constexpr const char* kLoopback = "127.0.0.1";

/// Message of a rank: the secret that it has drawn, its host, and the member that it is to be as a Join.
struct Introduction {
  std::array<std::byte, kSecretBytes> drawn{};
  HostIdentity host{};
  bool knows_address = false;
};

std::string to_hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

/// A rank that has no address of its own can use the loopback interface only if all ranks are on its host.
Status check_addresses(const std::vector<Introduction>& introductions) {
  for (std::size_t rank = 0; rank < introductions.size(); ++rank) {
    if (introductions[rank].knows_address || introductions.size() == 1) continue;
    const auto elsewhere = std::ranges::find_if(
        introductions, [&](const Introduction& other) { return !other.host.same_network(introductions[rank].host); });
    if (elsewhere == introductions.end()) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("Membership::create: rank {} does not know its address, and rank {} is on another host; "
                              "set MembershipOptions::host to the address at which the others reach it",
                              rank, elsewhere - introductions.begin()),
                  static_cast<int>(rank));
  }
  return {};
}

}  // namespace

Status check_timeout(std::string_view what, std::int64_t timeout_ns) {
  if (timeout_ns >= kMinTimeoutNs && timeout_ns <= kMaxTimeoutNs) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{} is {}, expected {} to {} nanoseconds", what, timeout_ns, kMinTimeoutNs, kMaxTimeoutNs));
}

std::string address_of(const Member& member) {
  const bool is_v6 = member.host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", is_v6 ? "[" : "", member.host, is_v6 ? "]" : "", member.port);
}

Result<Founded> found(Bootstrap* bootstrap, const MembershipOptions& options) {
  if (bootstrap == nullptr) {
    return Status(ErrorCode::kInvalidArgument,
                  "Membership::create: the bootstrap is null; create one with create_tcp_bootstrap or "
                  "create_in_process_bootstraps");
  }
  Founded founded;
  Introduction mine;
  mine.host = this_host();
  Status status = check_timeout("Membership::create: timeout_ns", options.timeout_ns);
  if (status.ok() && bootstrap->num_ranks() > kMaxRanks) {
    status = Status(ErrorCode::kInvalidArgument, fmt::format("Membership::create: {} ranks, expected at most {}",
                                                             bootstrap->num_ranks(), kMaxRanks));
  }
  std::string host = options.host.empty() ? bootstrap->local_address() : options.host;
  mine.knows_address = !host.empty();
  if (host.empty()) host = kLoopback;
  founded.secret = options.secret;
  if (status.ok() && options.secret.empty() && bootstrap->rank() == 0) status = bootstrap::fill_random(mine.drawn);
  founded.self = {bootstrap->rank(), host, 0, 0};

  // Two exchanges: an endpoint needs the secret.
  const std::int64_t timeout_ns = std::max(options.timeout_ns, kNsPerSecond);
  Result<std::vector<std::vector<std::byte>>> gathered =
      gather_or_fail(*bootstrap, status, std::as_bytes(std::span(&mine, 1)), timeout_ns);
  if (!gathered.ok()) return gathered.status();
  std::vector<Introduction> introductions(gathered->size());
  for (std::size_t rank = 0; rank < introductions.size(); ++rank) {
    if ((*gathered)[rank].size() == sizeof(Introduction)) {
      std::memcpy(&introductions[rank], (*gathered)[rank].data(), sizeof(Introduction));
    }
  }
  if (Status known = check_addresses(introductions); !known.ok()) return known;
  if (founded.secret.empty()) founded.secret = to_hex(introductions.front().drawn);

  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(host, founded.secret, bootstrap->num_ranks());
  Result<Listener> listener = listen_anywhere(host);
  status = endpoint.ok() ? listener.status() : endpoint.status();
  if (status.ok()) {
    founded.endpoint = std::move(*endpoint);
    founded.bootstrap_listener = std::move(listener->fd);
    founded.self.port = founded.endpoint->port();
    founded.self.bootstrap_port = listener->port;
  }
  gathered = gather_or_fail(*bootstrap, status, encode({}, Join{founded.self}), timeout_ns);
  if (!gathered.ok()) return gathered.status();
  for (const std::vector<std::byte>& message : *gathered) {
    Result<Letter> letter = decode(message);
    if (!letter.ok()) return letter.status();
    const auto* join = std::get_if<Join>(&letter->content);
    if (join == nullptr) return Status(ErrorCode::kTransport, "Membership::create: a rank sent no introduction");
    founded.view.members.push_back(join->member);
  }
  return founded;
}

}  // namespace ferry::membership
