/// Variables that launchers set. The input is lines of NAME=value, as env prints them.

#include <algorithm>
#include <map>
#include <string>

#include "bootstrap/launcher_environment.hpp"
#include "bootstrap/slurm.hpp"
#include "fuzz_target.hpp"

namespace ferry::test {
namespace {

using namespace bootstrap;
using Environment = std::map<std::string, std::string, std::less<>>;

Environment parse_lines(std::string_view text) {
  Environment environment;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    // A variable ends at its first zero, as it does for getenv.
    const std::string_view value = line.substr(equals + 1);
    environment.emplace(line.substr(0, equals), value.substr(0, value.find('\0')));
  }
  return environment;
}

EnvironmentLookup lookup_in(const Environment& environment) {
  return [&environment](const char* name) -> const char* {
    const auto found = environment.find(std::string_view(name));
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}

Result<TcpBootstrapOptions> options_from(const Environment& environment) {
  return tcp_bootstrap_options_from(lookup_in(environment));
}

bool same_options(const TcpBootstrapOptions& a, const TcpBootstrapOptions& b) {
  return a.rank == b.rank && a.num_ranks == b.num_ranks && a.host == b.host && a.port == b.port &&
         a.secret == b.secret && a.timeout_ns == b.timeout_ns && a.listen_fd == b.listen_fd;
}

/// True for every loopback address, and for few other hosts.
bool may_be_loopback(std::string_view host) {
  const bool like_ipv6 = host.ends_with('1') && host.find_first_not_of("0:.1") == std::string_view::npos;
  return host == "localhost" || host.starts_with("127.") || like_ipv6;
}

void fuzz_options(const Environment& environment) {
  const Result<TcpBootstrapOptions> options = options_from(environment);
  if (!options.ok()) {
    require_refusal(options.status(), ErrorCode::kInvalidArgument);
    return;
  }
  require(options->num_ranks >= 1 && options->rank >= 0 && options->rank < options->num_ranks,
          "the rank is less than the number of ranks");
  require(options->port != 0, "there is a port");
  require(!options->host.empty(), "there is a host");
  require(!options->secret.empty() || options->num_ranks == 1, "several ranks always have a secret");
  const auto given = environment.find("FERRY_SECRET");
  const bool derived = !options->secret.empty() && (given == environment.end() || given->second.empty());
  require(!derived || may_be_loopback(options->host), "a derived secret is used only on a loopback host");

  // Options read from a launcher's variables can also be set by hand, and then override the launcher's.
  Environment by_hand = {{"FERRY_RANK", std::to_string(options->rank)},
                         {"FERRY_NUM_RANKS", std::to_string(options->num_ranks)},
                         {"FERRY_HOST", options->host},
                         {"FERRY_PORT", std::to_string(options->port)},
                         {"FERRY_SECRET", options->secret}};
  const Result<TcpBootstrapOptions> alone = options_from(by_hand);
  require(alone.ok() && same_options(*alone, *options), "Ferry's own variables determine all options");
  by_hand.insert(environment.begin(), environment.end());
  const Result<TcpBootstrapOptions> overriding = options_from(by_hand);
  require(overriding.ok() && same_options(*overriding, *options), "Ferry's own variables override the launcher's");
}

void require_as_set(const Environment& environment, const EnvironmentVariable& variable) {
  const auto found = environment.find(variable.name);
  require(found != environment.end() && !variable.value.empty() && variable.value == found->second,
          "a launcher's variable is listed as it is set");
}

void fuzz_launchers(const Environment& environment) {
  for (const LauncherVariables& launcher : launcher_variables_from(lookup_in(environment))) {
    require(!launcher.launcher.empty(), "a launcher has a name");
    require_as_set(environment, launcher.rank);
    require_as_set(environment, launcher.num_ranks);
    if (launcher.num_local_ranks) require_as_set(environment, *launcher.num_local_ranks);
    if (launcher.num_hosts) require_as_set(environment, *launcher.num_hosts);
  }
}

void fuzz_node_list(std::string_view node_list) {
  const std::string host = first_host_of_node_list(node_list);
  require(host.size() <= node_list.size(), "a host is not longer than its list");
  require(host.find_first_of(std::string_view(",[]\0", 4)) == std::string::npos, "a host contains no separators");
  require(first_host_of_node_list(host) == host, "the first host of one host is itself");
  if (!host.empty() && node_list.find(',') == std::string_view::npos) {
    require(first_host_of_node_list(std::string(node_list) + ",other") == host, "further hosts change nothing");
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  const Environment environment = parse_lines(text);
  fuzz_options(environment);
  fuzz_launchers(environment);
  fuzz_node_list(text);
  for (const auto& [name, value] : environment) fuzz_node_list(value);
}

}  // namespace ferry::test
