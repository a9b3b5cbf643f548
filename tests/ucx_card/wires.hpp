#ifndef FERRY_TESTS_UCX_CARD_WIRES_HPP
#define FERRY_TESTS_UCX_CARD_WIRES_HPP

/// Sockets between the cards of different processes of one host. All threads may send; one waits on them.

#include <ucs/type/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

namespace ferry::ucx_card {

enum class FrameKind : std::uint32_t { kWrite, kRead, kMessage, kClosed, kGone, kAnswer };

/// Begins each request and answer; `payload_bytes` bytes follow.
struct Frame {
  FrameKind kind = FrameKind::kAnswer;
  ucs_status_t status = UCS_OK;  ///< kAnswer
  std::uint64_t ticket = 0;      ///< answered with the same
  std::uint64_t process = 0;     ///< of the sender
  std::uint64_t from = 0;        ///< the sender's worker
  std::uint64_t worker = 0;      ///< the receiver's worker
  std::uint64_t key = 0;         ///< kWrite, kRead: of the receiver's memory
  std::uint64_t remote = 0;      ///< address of the whole put or get
  std::uint64_t num_bytes = 0;   ///< of the whole put or get
  std::uint64_t begin = 0;       ///< piece of it
  std::uint64_t end = 0;
  std::uint64_t header_bytes = 0;  ///< kMessage: part of the payload
  std::uint64_t payload_bytes = 0;
};

class Wires {
 public:
  using Payload = std::span<const std::byte>;
  /// Called by wait(), without a lock: a frame has arrived on a wire; the wire to a process has ended.
  struct Events {
    std::function<void(int wire, const Frame& frame, Payload payload)> received;
    std::function<void(std::uint64_t process)> lost;
  };

  /// Opens the place where other processes find this one. Each call makes this process another one for them.
  void open(Events events);
  void close();
  /// Identifies this process from `open` on.
  std::uint64_t process() const { return process_; }

  /// Connects to a process unless that has been done. False if it is not there.
  bool connect(std::uint64_t process);
  bool send(std::uint64_t process, const Frame& frame, Payload payload = {});
  void answer(int wire, const Frame& frame, Payload payload = {});
  void send_to_all(const Frame& frame);

  /// Sleeps until something arrives or can be sent or wake() is called, and handles what has arrived.
  void wait();
  void wake();

 private:
  struct Wire {
    std::uint64_t process = 0;  // 0: the other process has connected
    std::vector<std::byte> in;  // the waiting thread's
    std::vector<std::byte> out;
  };

  // With the mutex.
  void append(Wire* wire, const Frame& frame, Payload payload);
  void wake_thread();
  void accept_all();
  // By the waiting thread.
  bool read_from(int fd);
  bool write_to(int fd);
  void drop(int fd);

  Events events_;
  std::uint64_t process_ = 0;
  std::uint64_t num_opened_ = 0;
  int listener_ = -1;
  int wake_fd_ = -1;
  std::mutex mutex_;  // guards the members below
  bool is_woken_ = false;
  std::map<int, Wire> wires_;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_WIRES_HPP
