#ifndef FERRY_BOOTSTRAP_HPP
#define FERRY_BOOTSTRAP_HPP

/// How ranks find each other before they share memory: a small authenticated all-gather.
/// A bootstrap carries only control data (options, arena names); tokens never pass through it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Nanoseconds in a second, to write deadlines readably: `5 * kNsPerSecond`.
inline constexpr std::int64_t kNsPerSecond = 1'000'000'000;

/// Deadline of every wait unless an option says otherwise. Long enough for a rank that loads a model or is stopped for
/// a moment, short enough that a dead job does not hold its machine: half of the 100 s that engines of this kind use.
inline constexpr std::int64_t kDefaultTimeoutNs = 50 * kNsPerSecond;

/// Largest message one rank may contribute to an all-gather. Receivers refuse a longer length before they allocate.
inline constexpr std::size_t kMaxBootstrapMessageBytes = std::size_t{1} << 20;

/// Rank numbers and an all-gather. Implement it to ride on a launcher of your own (MPI, a key-value store, …).
class FERRY_API Bootstrap {
 public:
  virtual ~Bootstrap();

  /// This rank, 0 <= rank() < num_ranks().
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  /// Every rank gives `mine` (at most kMaxBootstrapMessageBytes, lengths may differ) and gets all, indexed by rank.
  /// Collective: every rank calls it, in the same order. Waits at most `timeout_ns` nanoseconds for the
  /// ranks, then at most as long again (never more than 4 s) to agree with them on who was missing.
  /// @errors kInvalidArgument (too long), kTimeout / kPeerLost naming the rank, kTransport. After an error the
  /// bootstrap
  ///         is unusable and every later call returns the same error.
  /// @thread one call at a time per object
  virtual Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                                 std::int64_t timeout_ns) = 0;
};

/// One bootstrap per rank for ranks that are threads of this process: element r belongs to the thread that is rank r.
/// A rank that destroys its object while others still gather is reported to them as kPeerLost.
/// @errors kInvalidArgument: num_ranks < 1
FERRY_API Result<std::vector<std::shared_ptr<Bootstrap>>> create_in_process_bootstraps(int num_ranks);

/// Settings of the TCP bootstrap. Rank 0 listens, the others connect to it.
struct TcpBootstrapOptions {
  int rank = -1;
  int num_ranks = 0;
  std::string host = "127.0.0.1";  ///< where rank 0 listens: an address or a name that every rank can resolve
  std::uint16_t port = 0;          ///< where rank 0 listens; not the port that torchrun's own store uses
  std::string secret{};            ///< shared by the group; every peer proves that it knows it, it is never sent
  std::int64_t timeout_ns = kDefaultTimeoutNs;  ///< for all ranks to arrive
  int listen_fd = -1;  ///< rank 0 only: an already bound, listening socket to use instead of host and port (ownership
                       ///< passes to the bootstrap); lets a parent pick a free port before it forks
};

/// Connects all ranks. Collective. Peers authenticate each other by HMAC-SHA-256 over fresh nonces (RFC 2104);
/// whoever cannot, sends garbage, or stalls is dropped without effect on the group.
/// @errors kInvalidArgument: rank, num_ranks, host, secret; or ranks disagree about num_ranks or library version (the
///         message names both values and both ranks; every rank gets it), or two peers claim one rank
///         kTimeout: not all ranks arrived, naming the lowest that is missing
///         kPeerLost, kTransport: the connection to rank 0 was cut after this rank had been let in; kSystem
FERRY_API Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap(const TcpBootstrapOptions& options);

/// Settings from the variables that launchers set: torchrun (RANK, WORLD_SIZE, MASTER_ADDR), Open MPI's mpirun
/// (OMPI_COMM_WORLD_*), MPICH's and Intel's (PMI_*), srun (SLURM_*). FERRY_RANK, FERRY_NUM_RANKS, FERRY_HOST,
/// FERRY_PORT and FERRY_SECRET override them. See docs/bootstrap.md for the full table. Only reads the environment.
/// @errors kInvalidArgument naming the variable that is missing or malformed and what to set
FERRY_API Result<TcpBootstrapOptions> tcp_bootstrap_options_from_environment();

}  // namespace ferry

#endif  // FERRY_BOOTSTRAP_HPP
