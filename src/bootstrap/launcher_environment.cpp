#include "bootstrap/launcher_environment.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

#include "bootstrap/handshake.hpp"
#include "bootstrap/ports.hpp"
#include "bootstrap/slurm.hpp"
#include "bootstrap/socket.hpp"

namespace ferry::bootstrap {
namespace {

constexpr std::string_view kLoopback = "127.0.0.1";
constexpr int kMaxPort = 65'535;
constexpr std::uint16_t kFirstUnprivilegedPort = 1024;

/// Names of one launcher's variables; null if there is none.
struct Launcher {
  const char* name;
  const char* rank;
  const char* num_ranks;
  const char* num_local_ranks;        ///< ranks on this host: equal to num_ranks means one host
  const char* num_hosts;              ///< 1 means one host
  bool one_host_by_default;           ///< if neither num_local_ranks nor num_hosts is set
  std::array<const char*, 2> job_id;  ///< joined, they distinguish the jobs of one user
  const char* host_list;
  const char* launch_address;
  const char* step = nullptr;  ///< if there is one, its value says whether the launcher started this process
};

constexpr Launcher kByHand = {.name = "FERRY_*",
                              .rank = "FERRY_RANK",
                              .num_ranks = "FERRY_NUM_RANKS",
                              .num_local_ranks = nullptr,
                              .num_hosts = nullptr,
                              .one_host_by_default = true,
                              .job_id = {},
                              .host_list = nullptr,
                              .launch_address = nullptr};

// In order of precedence: mpirun or torchrun inside a Slurm job passes on Slurm's variables, which then describe the
// allocation and not the ranks. The name of a launcher is part of the derived secret (read_secret).
constexpr Launcher kLaunchers[] = {
    {.name = "torchrun",
     .rank = "RANK",
     .num_ranks = "WORLD_SIZE",
     .num_local_ranks = "LOCAL_WORLD_SIZE",
     .num_hosts = nullptr,
     .one_host_by_default = false,
     .job_id = {"TORCHELASTIC_RUN_ID", nullptr},
     .host_list = nullptr,
     .launch_address = nullptr},
    {.name = "Open MPI's mpirun",
     .rank = "OMPI_COMM_WORLD_RANK",
     .num_ranks = "OMPI_COMM_WORLD_SIZE",
     .num_local_ranks = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .num_hosts = nullptr,
     .one_host_by_default = false,
     .job_id = {"PMIX_NAMESPACE", nullptr},
     .host_list = nullptr,
     .launch_address = nullptr},
    {.name = "a PMI launcher (MPICH, Intel MPI)",
     .rank = "PMI_RANK",
     .num_ranks = "PMI_SIZE",
     .num_local_ranks = "MPI_LOCALNRANKS",
     // `srun --mpi=pmi2` sets both PMI's and Slurm's variables. The step is not part of the job id: it differs between
     // ranks if mpiexec starts some of them itself.
     .num_hosts = "SLURM_NNODES",
     .one_host_by_default = true,
     .job_id = {"SLURM_JOB_ID", nullptr},
     .host_list = "SLURM_STEP_NODELIST",
     .launch_address = "SLURM_LAUNCH_NODE_IPADDR"},
    {.name = "srun",
     .rank = "SLURM_PROCID",
     .num_ranks = "SLURM_NTASKS",
     .num_local_ranks = nullptr,
     .num_hosts = "SLURM_NNODES",
     .one_host_by_default = false,
     .job_id = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     .host_list = "SLURM_STEP_NODELIST",
     .launch_address = "SLURM_LAUNCH_NODE_IPADDR",
     .step = "SLURM_STEP_ID"},
};

Status invalid(std::string text) {
  return Status(ErrorCode::kInvalidArgument, std::string("tcp_bootstrap_options_from_environment: ").append(text));
}

bool started_this_process(const Launcher& launcher, const EnvironmentLookup& lookup) {
  return launcher.step == nullptr || is_step_of_srun(lookup(launcher.step));
}

class Reader {
 public:
  explicit Reader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  Result<TcpBootstrapOptions> read();

 private:
  std::optional<std::string> text(const char* name) const;
  /// Accepts only decimal digits, and only a value in [min, max].
  Status number(const char* name, int min, int max, std::optional<int>* value) const;
  Status required_number(const char* name, const char* own_name, int min, int max, int* value) const;

  Status choose_launcher();
  Status read_ranks(TcpBootstrapOptions* options) const;
  Status read_host(int num_ranks, std::string* host) const;
  Status given_host(const char* name, std::string* host) const;
  Status read_port(TcpBootstrapOptions* options) const;
  Status read_secret(TcpBootstrapOptions* options) const;
  Status is_one_host(int num_ranks, bool* one_host) const;
  std::string job_id() const;

  const EnvironmentLookup& lookup_;
  const Launcher* launcher_ = &kByHand;
};

std::optional<std::string> Reader::text(const char* name) const {
  const char* value = name == nullptr ? nullptr : lookup_(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

Status Reader::number(const char* name, int min, int max, std::optional<int>* value) const {
  const std::optional<std::string> digits = text(name);
  if (!digits) return {};
  int parsed = 0;
  const char* end = digits->data() + digits->size();
  const auto [stop, error] = std::from_chars(digits->data(), end, parsed);
  if (error != std::errc() || stop != end || parsed < min || parsed > max) {
    return invalid(fmt::format("{}='{}', expected a whole number from {} to {}", name, *digits, min, max));
  }
  *value = parsed;
  return {};
}

Status Reader::required_number(const char* name, const char* own_name, int min, int max, int* value) const {
  std::optional<int> found;
  if (Status status = number(own_name, min, max, &found); !status.ok()) return status;
  if (!found) {
    if (Status status = number(name, min, max, &found); !status.ok()) return status;
  }
  if (!found) {
    const std::string_view alternative = launcher_ == &kByHand ? "" : own_name;
    return invalid(fmt::format("{} is not set; {} sets it. Set {}{}{}", name,
                               launcher_ == &kByHand ? "no launcher" : launcher_->name, name,
                               alternative.empty() ? "" : " or ", alternative));
  }
  *value = *found;
  return {};
}

Status Reader::choose_launcher() {
  const bool by_hand = text(kByHand.rank) && text(kByHand.num_ranks);
  const Launcher* half_set = nullptr;
  for (const Launcher& launcher : kLaunchers) {
    if (!started_this_process(launcher, lookup_)) continue;
    const bool has_rank = text(launcher.rank).has_value();
    const bool has_num_ranks = text(launcher.num_ranks).has_value();
    if (has_rank && has_num_ranks) {
      launcher_ = &launcher;
      return {};
    }
    if ((has_rank || has_num_ranks) && half_set == nullptr) half_set = &launcher;
  }
  if (by_hand) return {};
  if (half_set != nullptr) launcher_ = half_set;
  if (launcher_ != &kByHand || text(kByHand.rank) || text(kByHand.num_ranks)) return {};
  const bool in_slurm = text("SLURM_PROCID").has_value();
  return invalid(
      fmt::format("no launcher's variables are set{}; start the ranks with torchrun, mpirun or srun, or set FERRY_RANK "
                  "and FERRY_NUM_RANKS (and FERRY_HOST, FERRY_PORT, FERRY_SECRET)",
                  in_slurm ? " but Slurm's, in a batch script or a shell that is no step of srun" : ""));
}

Status Reader::read_ranks(TcpBootstrapOptions* options) const {
  constexpr int kMax = std::numeric_limits<int>::max();
  Status status = required_number(launcher_->num_ranks, kByHand.num_ranks, 1, kMax, &options->num_ranks);
  if (!status.ok()) return status;
  status = required_number(launcher_->rank, kByHand.rank, 0, kMax, &options->rank);
  if (!status.ok()) return status;
  if (options->rank < options->num_ranks) return {};
  const char* rank_name = text(kByHand.rank) ? kByHand.rank : launcher_->rank;
  const char* num_ranks_name = text(kByHand.num_ranks) ? kByHand.num_ranks : launcher_->num_ranks;
  return invalid(fmt::format("{}={}, expected 0 to {} because {}={}", rank_name, options->rank, options->num_ranks - 1,
                             num_ranks_name, options->num_ranks));
}

Status Reader::is_one_host(int num_ranks, bool* one_host) const {
  constexpr int kMax = std::numeric_limits<int>::max();
  std::optional<int> num_local_ranks;
  std::optional<int> num_hosts;
  if (Status status = number(launcher_->num_local_ranks, 1, kMax, &num_local_ranks); !status.ok()) return status;
  if (Status status = number(launcher_->num_hosts, 1, kMax, &num_hosts); !status.ok()) return status;
  if (num_local_ranks) {
    *one_host = *num_local_ranks == num_ranks;
  } else if (num_hosts) {
    *one_host = *num_hosts == 1;
  } else {
    *one_host = launcher_->one_host_by_default || num_ranks == 1;
  }
  return {};
}

/// Leaves `host` empty if the variable is not set.
Status Reader::given_host(const char* name, std::string* host) const {
  *host = without_brackets(text(name).value_or(""));
  const bool has_port = host->starts_with('[') || std::ranges::count(*host, ':') == 1;
  if (!has_port) return {};
  return invalid(
      fmt::format("{}='{}', expected an address or a name and no port; FERRY_PORT sets the port", name, *host));
}

Status Reader::read_host(int num_ranks, std::string* host) const {
  for (const char* name : {"FERRY_HOST", "MASTER_ADDR"}) {
    if (Status status = given_host(name, host); !status.ok() || !host->empty()) return status;
  }
  bool one_host = false;
  if (Status status = is_one_host(num_ranks, &one_host); !status.ok()) return status;
  if (one_host) {
    *host = kLoopback;
    return {};
  }
  if (const std::optional<std::string> host_list = text(launcher_->host_list))
    *host = first_host_of_node_list(*host_list);
  if (!host->empty()) return {};
  if (Status status = given_host(launcher_->launch_address, host); !status.ok() || !host->empty()) return status;
  return invalid(
      fmt::format("the ranks that {} started may be on several hosts, and no variable gives the host of rank 0; "
                  "set FERRY_HOST to its address on every rank",
                  launcher_->name));
}

std::string Reader::job_id() const {
  std::string id;
  for (const char* name : launcher_->job_id) {
    if (const std::optional<std::string> part = text(name)) id += (id.empty() ? "" : ".") + *part;
  }
  return id;
}

Status Reader::read_port(TcpBootstrapOptions* options) const {
  std::optional<int> own;
  std::optional<int> master;
  if (Status status = number("FERRY_PORT", 1, kMaxPort, &own); !status.ok()) return status;
  if (own) {
    options->port = static_cast<std::uint16_t>(*own);
    return {};
  }
  if (Status status = number("MASTER_PORT", 1, kMaxPort, &master); !status.ok()) return status;
  const std::string id = job_id();
  if (!master && id.empty()) {
    // Without spare ports: a second rank 0 by mistake, the likely reason where no launcher counts ranks, must not hide.
    options->port = kDefaultPort;
    return {};
  }
  options->port = !master               ? derive_port(id)
                  : *master == kMaxPort ? kFirstUnprivilegedPort
                                        : static_cast<std::uint16_t>(*master + 1);
  options->num_spare_ports = kNumSparePorts;
  return {};
}

bool is_loopback(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6) != 0;
  return host == "localhost";
}

Status Reader::read_secret(TcpBootstrapOptions* options) const {
  if (std::optional<std::string> secret = text("FERRY_SECRET")) {
    options->secret = *secret;
    return {};
  }
  if (options->num_ranks == 1) return {};
  if (!is_loopback(options->host)) {
    return invalid(
        fmt::format("FERRY_SECRET is not set, and rank 0 listens on '{}', which other machines may reach; make a "
                    "secret with `openssl rand -hex 32` and set FERRY_SECRET to it on every rank",
                    options->host));
  }
  // Any user of this host can compute this secret. If the launcher gives a job id, it prevents that jobs connect to
  // each other by mistake, and no more.
  const std::string what = fmt::format("{}|{}|{}|{}", launcher_->name, job_id(), options->port, getuid());
  const Result<Digest> digest = hmac_sha256(as_byte_span("ferry weak secret of a job on one host"), as_byte_span(what));
  if (!digest.ok()) return digest.status();
  for (std::byte value : *digest) options->secret += fmt::format("{:02x}", std::to_integer<unsigned>(value));
  return {};
}

Result<TcpBootstrapOptions> Reader::read() {
  if (Status status = choose_launcher(); !status.ok()) return status;
  TcpBootstrapOptions options;
  options.host.clear();
  if (Status status = read_ranks(&options); !status.ok()) return status;
  if (Status status = read_host(options.num_ranks, &options.host); !status.ok()) return status;
  if (Status status = read_port(&options); !status.ok()) return status;
  if (Status status = read_secret(&options); !status.ok()) return status;
  return options;
}

}  // namespace

Result<TcpBootstrapOptions> tcp_bootstrap_options_from(const EnvironmentLookup& lookup) {
  return Reader(lookup).read();
}

std::vector<LauncherVariables> launcher_variables_from(const EnvironmentLookup& lookup) {
  const auto read = [&](const char* name) -> std::optional<EnvironmentVariable> {
    const char* value = name == nullptr ? nullptr : lookup(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return EnvironmentVariable{name, value};
  };
  std::vector<LauncherVariables> found;
  const auto add_if_set = [&](const Launcher& launcher, const char* name) {
    auto rank = read(launcher.rank);
    auto num_ranks = read(launcher.num_ranks);
    if (!rank || !num_ranks || !started_this_process(launcher, lookup)) return;
    found.push_back(
        {name, *std::move(rank), *std::move(num_ranks), read(launcher.num_local_ranks), read(launcher.num_hosts)});
  };
  add_if_set(kByHand, "FERRY_* variables");
  for (const Launcher& launcher : kLaunchers) add_if_set(launcher, launcher.name);
  return found;
}

}  // namespace ferry::bootstrap

namespace ferry {
namespace {

const char* look_up(const char* name) { return std::getenv(name); }

}  // namespace

Result<TcpBootstrapOptions> tcp_bootstrap_options_from_environment() {
  return bootstrap::tcp_bootstrap_options_from(look_up);
}

std::vector<LauncherVariables> launcher_variables_from_environment() {
  return bootstrap::launcher_variables_from(look_up);
}

}  // namespace ferry
