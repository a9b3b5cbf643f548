#ifndef FERRY_NET_LOOPBACK_INBOX_HPP
#define FERRY_NET_LOOPBACK_INBOX_HPP

/// Queue in which the other ends of this process leave operations for one end, and how they find it.

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
  /// Sorted by kind, operations never break the ordering rules of engine.hpp.
  enum class Kind { kPut, kAtomic, kNotify, kGet, kAnswer, kFlush, kGone };
  Kind kind = Kind::kPut;
  int from = 0;
  int channel = 0;
  std::size_t offset = 0;        // kPut, kGet
  std::vector<std::byte> bytes;  // kPut, kAnswer: copied by the sender, so that no end reads another's memory
  std::uint64_t value = 0;       // kNotify, kAnswer
  std::size_t num_bytes = 0;     // kGet
  AtomicOp atomic{};             // kAtomic
  std::uint64_t ticket = 0;      // kAtomic, kGet, kFlush, kAnswer
  int polls_left = -1;           // for the receiver: how long a fault delays it; -1: not determined yet
  std::uint64_t arrival = 0;     // for the receiver: how many came before it
  std::int64_t posted_ns = 0;    // where the receiver's link has a rate
  std::int64_t due_ns = 0;       // for the receiver: when the link has carried it
};

class Inbox {
 public:
  /// Any thread. Dropped once the owner has shut it.
  void post(Operation operation);
  /// By the owner: everything posted later is dropped.
  void shut();
  /// By the owner: everything that has arrived, in order.
  std::vector<Operation> take();
  bool empty() const;

  const WakeFd& wake() const { return wake_; }

 private:
  WakeFd wake_;
  mutable std::mutex mutex_;
  std::vector<Operation> operations_;
  bool shut_ = false;
};

/// Process-wide, by weak reference: an end that is gone is not found. Tokens are random, so networks cannot be
/// confused.
void offer_inbox(const Token& token, const std::shared_ptr<Inbox>& inbox);
std::shared_ptr<Inbox> find_inbox(const Token& token);
void withdraw_inbox(const Token& token);
/// Every end polls again: something other than an operation has changed.
void wake_all_ends();

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_INBOX_HPP
