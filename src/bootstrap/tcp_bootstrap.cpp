#include "bootstrap/tcp_bootstrap.hpp"

#include <fmt/format.h>

#include "bootstrap/errors.hpp"
#include "bootstrap/socket.hpp"
#include "core/log.hpp"
#include "ferry/version.hpp"

namespace ferry {

Bootstrap::~Bootstrap() = default;

std::string Bootstrap::local_address() const { return {}; }

namespace bootstrap {
namespace {

// Rank 0 holds a connection to every rank; larger groups need another topology.
constexpr int kMaxRanks = 65'536;

// HMAC accepts any key; a longer one is more likely a mistake (a whole file) than a secret.
constexpr std::size_t kMaxSecretBytes = 4096;

// A rank has a connection to each of them while it looks for rank 0.
constexpr int kMaxSparePorts = 16;

Status check(const TcpBootstrapOptions& options) {
  const auto bad = [](std::string text) {
    return Status(ErrorCode::kInvalidArgument, std::string("create_tcp_bootstrap: ").append(text));
  };
  if (options.num_ranks < 1 || options.num_ranks > kMaxRanks) {
    return bad(fmt::format("num_ranks={}, expected 1 to {}; set the number of ranks in the group", options.num_ranks,
                           kMaxRanks));
  }
  if (options.rank < 0 || options.rank >= options.num_ranks) {
    return bad(fmt::format("rank={}, expected 0 to {} because num_ranks={}; give each process its own number",
                           options.rank, options.num_ranks - 1, options.num_ranks));
  }
  if (options.num_spare_ports < 0 || options.num_spare_ports > kMaxSparePorts) {
    return bad(fmt::format("rank {} has num_spare_ports={}, expected 0 to {}", options.rank, options.num_spare_ports,
                           kMaxSparePorts));
  }
  if (options.timeout_ns <= 0) {
    return bad(fmt::format("rank {} has timeout_ns={}, expected more than 0", options.rank, options.timeout_ns));
  }
  if (options.num_ranks == 1) return {};
  if (options.secret.empty()) {
    return bad(fmt::format(
        "rank {} has an empty secret; make one with `openssl rand -hex 32` and give it to every rank", options.rank));
  }
  if (options.secret.size() > kMaxSecretBytes) {
    return bad(
        fmt::format("rank {} has a secret of {} bytes, expected at most {}; `openssl rand -hex 32` makes a good "
                    "one",
                    options.rank, options.secret.size(), kMaxSecretBytes));
  }
  const bool uses_listen_fd = options.rank == 0 && options.listen_fd >= 0;
  if (uses_listen_fd) return {};
  if (options.host.empty() || options.host.find('\0') != std::string::npos) {
    return bad(
        fmt::format("rank {} has no host; give the address or name of the machine that rank 0 runs on", options.rank));
  }
  if (options.port == 0) {
    return bad(
        fmt::format("rank {} has port=0, expected 1 to 65535; choose a free port of rank 0's machine", options.rank));
  }
  return {};
}

/// Group of one rank, which needs no connections.
class SoloBootstrap final : public Bootstrap {
 public:
  int rank() const override { return 0; }
  int num_ranks() const override { return 1; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override {
    if (error_.ok()) error_ = check_all_gather_arguments(0, mine.size(), timeout_ns);
    if (!error_.ok()) return error_;
    return std::vector<std::vector<std::byte>>{{mine.begin(), mine.end()}};
  }

 private:
  Status error_;
};

}  // namespace

Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap_as(const TcpBootstrapOptions& given, const std::string& version,
                                                           const Vigil& vigil) {
  TcpBootstrapOptions options = given;
  options.host = without_brackets(given.host);
  // From here on rank 0 owns the descriptor, even if this call fails.
  UniqueFd listener(options.rank == 0 ? options.listen_fd : -1);
  if (Status status = check(options); !status.ok()) return status;
  if (options.num_ranks == 1) return std::shared_ptr<Bootstrap>(std::make_shared<SoloBootstrap>());
  return options.rank == 0 ? create_tcp_root(options, std::move(listener), version, vigil)
                           : create_tcp_peer(options, version, vigil);
}

}  // namespace bootstrap

Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap(const TcpBootstrapOptions& options) {
  static_cast<void>(open_log());  // Group::create returns its error
  const LogRank rank{options.rank, options.num_ranks};
  const LogPhase phase(rank, "bootstrap: meeting of all ranks");
  Result<std::shared_ptr<Bootstrap>> created = bootstrap::create_tcp_bootstrap_as(options, version());
  if (created.ok()) {
    log_line(LogLevel::kInfo, rank, "bootstrap: root=\"{}\" port={} address=\"{}\"", options.host, options.port,
             (*created)->local_address());
  }
  log_error(rank, created.status());
  return created;
}

}  // namespace ferry
