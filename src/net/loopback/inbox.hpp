#ifndef FERRY_NET_LOOPBACK_INBOX_HPP
#define FERRY_NET_LOOPBACK_INBOX_HPP

/// Queue of operations that other ends of this process post to one end, and the directory in which they find it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "net/blob.hpp"
#include "net/remote_words.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net::loopback {

struct Operation {
  /// Sorting by kind never breaks the ordering rules of engine.hpp.
  enum class Kind { kPut, kAtomic, kNotify, kGet, kAnswer, kFlush, kGone };
  Kind kind = Kind::kPut;
  int from = 0;
  int channel = 0;
  std::size_t offset = 0;        // kPut, kGet
  std::vector<std::byte> bytes;  // kPut, kAnswer: copied by the sender, so that no end reads another end's memory
  std::uint64_t value = 0;       // kNotify, kAnswer
  std::size_t num_bytes = 0;     // kGet
  AtomicOp atomic{};             // kAtomic
  std::uint64_t ticket = 0;      // kAtomic, kGet, kFlush, kAnswer
  int polls_left = -1;           // for the receiver: polls left of a fault's delay; -1: not determined yet
  std::uint64_t arrival = 0;     // for the receiver: number of this arrival
  std::int64_t posted_ns = 0;    // set if the receiver's link has a rate
  std::int64_t due_ns = 0;       // for the receiver: time at which the link has carried the operation
};

class Inbox {
 public:
  /// Any thread. Dropped if the owner has shut the inbox.
  void post(Operation operation);
  /// Called by the owner: operations posted later are dropped.
  void shut();
  /// Called by the owner: all operations that have arrived, in order.
  std::vector<Operation> take();
  bool empty() const;

  const WakeFd& wake() const { return wake_; }

 private:
  WakeFd wake_;
  mutable std::mutex mutex_;
  std::vector<Operation> operations_;
  bool shut_ = false;
};

/// Process-wide directory of weak references: a destroyed end is not found. Tokens are random, so networks cannot be
/// confused.
void offer_inbox(const Token& token, const std::shared_ptr<Inbox>& inbox);
std::shared_ptr<Inbox> find_inbox(const Token& token);
void withdraw_inbox(const Token& token);
/// Makes every end poll again after a change other than a posted operation.
void wake_all_ends();

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_INBOX_HPP
