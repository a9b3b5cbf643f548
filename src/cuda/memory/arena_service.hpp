#ifndef FERRY_CUDA_MEMORY_ARENA_SERVICE_HPP
#define FERRY_CUDA_MEMORY_ARENA_SERVICE_HPP

/// Announces new memory to ranks in other processes, and maps memory that they announce. One thread per rank answers
/// its peers, whatever the rank itself is doing, so ranks may grow in any order, even at the same time, without waiting
/// for each other's calls.

#include <poll.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/unique_fd.hpp"
#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/peer_mapping.hpp"
#include "ferry/status.hpp"
#include "node/peer_link.hpp"

namespace ferry::cuda {

struct ArenaMessage;  // private

class ArenaService {
 public:
  /// One rank in another process. Both pointers must stay valid as long as the service.
  struct Peer {
    int rank = 0;
    const node::PeerLink* link = nullptr;
    PeerMapping* mapping = nullptr;  ///< used by the service's thread only
  };

  struct Options {
    std::int64_t timeout_ns = 0;  ///< limit on how long `announce` waits
    bool without_lost = false;    ///< lost peers need not map memory: the group continues without them
  };

  ArenaService(const std::vector<Peer>& peers, const Options& options);
  /// Ends the thread. No `announce` may be in progress.
  ~ArenaService();
  ArenaService(const ArenaService&) = delete;
  ArenaService& operator=(const ArenaService&) = delete;

  /// Starts to answer the peers.
  Status start();

  /// Announces a chunk of this rank's arena to every peer, and waits until all have mapped it. After an error, asks the
  /// peers that received the announcement to unmap it. One call at a time.
  /// @errors kPeerLost, kTimeout naming the rank; the error of a peer that could not map it; kTransport, kSystem
  Status announce(const ArenaChunk& chunk);

  /// Makes the `announce` in progress, if any, fail soon, and every later one.
  void cancel();

 private:
  struct PeerState {
    Peer peer;
    bool answered = false;  // guarded by mutex_: to the current announcement
    Status answer;          // guarded by mutex_
    Status lost;            // guarded by mutex_: reason why this peer sends no more messages; ok while it may
  };

  Status send_to_all(const ArenaMessage& message, int fd, std::size_t* num_sent);
  void forgo(PeerState& state);
  Status wait_for_answers(std::int64_t deadline_ns);
  void serve() noexcept;
  bool serve_peer(PeerState& state) noexcept;
  Status receive_from(PeerState& state);
  void handle(PeerState& state, const ArenaMessage& message, int fd);
  void lose(PeerState& state, Status why) noexcept;

  const Options options_;
  const Status out_of_memory_;  // made in advance
  UniqueFd stop_;               // eventfd
  std::vector<pollfd> poll_set_;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<PeerState> states_;
  std::uint64_t sequence_ = 0;  // guarded by mutex_: number of the current announcement
  bool cancelled_ = false;      // guarded by mutex_
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_ARENA_SERVICE_HPP
