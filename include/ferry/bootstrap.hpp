#ifndef FERRY_BOOTSTRAP_HPP
#define FERRY_BOOTSTRAP_HPP

/// Bootstrap: the small authenticated all-gather by which ranks find each other before they share memory. It carries
/// only control data (options, names of shared memory), never tokens.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Nanoseconds in a second, for readable timeouts: `5 * kNsPerSecond`.
inline constexpr std::int64_t kNsPerSecond = 1'000'000'000;

/// Time for all ranks to arrive at a bootstrap, unless an option sets another. Ranks that are launched together arrive
/// within seconds; a rank that never started should not block its machine for long. Calls of a group have their own
/// deadline (kDefaultCallTimeoutNs).
inline constexpr std::int64_t kDefaultTimeoutNs = 50 * kNsPerSecond;

/// Largest message of one rank in an all-gather. Receivers reject a greater length before they allocate memory.
inline constexpr std::size_t kMaxBootstrapMessageBytes = std::size_t{1} << 20;

/// Rank numbers and an all-gather. Implement it to use your own transport (MPI, a key-value store, …).
class FERRY_API Bootstrap {
 public:
  virtual ~Bootstrap();

  /// This rank, 0 <= rank() < num_ranks().
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  /// Every rank passes `mine` (at most kMaxBootstrapMessageBytes, lengths may differ) and receives the messages of all
  /// ranks, indexed by rank. Collective: every rank calls it, in the same order. Waits at most `timeout_ns` nanoseconds
  /// for the ranks, then at most as long again (never more than 4 s) to agree with them on which rank was missing.
  /// @errors kInvalidArgument (too long), kTimeout / kPeerLost naming the rank, kTransport. After an error the
  ///         bootstrap is unusable and every later call returns the same error.
  /// @thread one call at a time per object
  virtual Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                                 std::int64_t timeout_ns) = 0;

  /// Numeric IPv4 or IPv6 address of this host on the network that joins it to rank 0; on rank 0, an address at which
  /// other hosts reach it. Empty: not known. A group of several nodes uses the network interface that has this address,
  /// unless GroupOptions::net_devices names another.
  virtual std::string local_address() const;
};

/// One bootstrap per rank for ranks that are threads of this process; element r is for the thread that is rank r.
/// If a rank destroys its object while others still gather, they get kPeerLost.
/// @errors kInvalidArgument: num_ranks < 1
FERRY_API Result<std::vector<std::shared_ptr<Bootstrap>>> create_in_process_bootstraps(int num_ranks);

/// Settings of the TCP bootstrap. Rank 0 listens, the others connect to it.
struct TcpBootstrapOptions {
  int rank = -1;
  int num_ranks = 0;
  std::string host = "127.0.0.1";  ///< rank 0's address, or a name for it that every rank can resolve
  std::uint16_t port = 0;          ///< port on which rank 0 listens; not the port of torchrun's own store
  std::string secret{};            ///< the same on all ranks; each proves knowledge of it, it is never sent
  std::int64_t timeout_ns = kDefaultTimeoutNs;  ///< time for all ranks to arrive
  int listen_fd = -1;       ///< rank 0 only: a bound, listening socket to use instead of host and port, owned by the
                            ///< bootstrap from then on; lets a parent that forks its ranks choose a free port first
  int num_spare_ports = 0;  ///< further ports, derived from `port`, of which rank 0 takes the first free one if `port`
                            ///< is taken; the same on all ranks, 0 to 16
};

/// Connects all ranks. Collective. Peers authenticate each other by HMAC-SHA-256 over new nonces (RFC 2104). A
/// connection that fails to authenticate, sends garbage, or stalls is closed without effect on the group.
/// @errors kInvalidArgument: rank, num_ranks, host, secret; or ranks disagree about num_ranks or library version (the
///         message names both values and both ranks; every rank gets it), or two peers claim one rank
///         kTimeout: not all ranks arrived; names the lowest missing rank
///         kPeerLost, kTransport: the connection to rank 0 was lost after rank 0 had accepted this rank; kSystem
FERRY_API Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap(const TcpBootstrapOptions& options);

/// Settings from the variables that launchers set: torchrun (RANK, WORLD_SIZE, MASTER_ADDR), Open MPI's mpirun
/// (OMPI_COMM_WORLD_*), MPICH's and Intel's (PMI_*), srun (SLURM_*). FERRY_RANK, FERRY_NUM_RANKS, FERRY_HOST,
/// FERRY_PORT and FERRY_SECRET override them. See docs/bootstrap.md for the full table. Only reads the environment.
/// @errors kInvalidArgument naming the variable that is missing or malformed, and the remedy
FERRY_API Result<TcpBootstrapOptions> tcp_bootstrap_options_from_environment();

/// Environment variable and its unchecked, non-empty text.
struct EnvironmentVariable {
  std::string name;
  std::string value;
};

/// Variables that one launcher set in this process; unset ones are absent.
struct LauncherVariables {
  std::string launcher;  ///< e.g. "torchrun", "srun"; "FERRY_* variables" if the user set them by hand
  EnvironmentVariable rank;
  EnvironmentVariable num_ranks;
  std::optional<EnvironmentVariable> num_local_ranks;  ///< ranks on this host
  std::optional<EnvironmentVariable> num_hosts;        ///< hosts that have ranks
};

/// Every launcher whose rank and number of ranks are both set here, in the order of preference of
/// tcp_bootstrap_options_from_environment. Empty if no launcher started this process. Only reads the environment.
FERRY_API std::vector<LauncherVariables> launcher_variables_from_environment();

}  // namespace ferry

#endif  // FERRY_BOOTSTRAP_HPP
