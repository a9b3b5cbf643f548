#ifndef FERRY_NET_UCX_WAITING_HPP
#define FERRY_NET_UCX_WAITING_HPP

/// Messages to a peer that wait until a card's earlier writes have arrived. A notify that waits is not sent if a later
/// one of its channel goes with it: only the highest value of a channel counts (net/engine.hpp).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "net/ucx/message.hpp"

namespace ferry::net::ucx {

class WaitingMessages {
 public:
  explicit WaitingMessages(std::size_t num_channels) : newest_(num_channels) {}

  bool empty() const { return waiting_.empty(); }
  void clear() {
    waiting_.clear();
    ++round_;
  }

  /// `write`: number of the last write before the message. Writes after number `flush_started` have no flush yet, so
  /// the next one serves them all.
  void add(const Message& message, std::uint64_t write, std::uint64_t flush_started) {
    if (message.kind == MessageKind::kNotify) {
      Newest& newest = newest_[message.channel];
      if (newest.round == round_ && waiting_[newest.idx].after_write > flush_started) {
        supersede(waiting_[newest.idx].message, message);
        waiting_[newest.idx].after_write = write;
        return;
      }
      newest = {round_, waiting_.size()};
    }
    waiting_.push_back({message, write, false});
  }
  /// Adds a message that stays behind all others.
  void add_last(const Message& message, std::uint64_t write) { waiting_.push_back({message, write, true}); }

  /// Passes the messages behind writes up to number `arrived` to `send(message, is_last)`, in order, and removes them.
  /// `holds`: only a last one is due. True if any was due.
  template <typename Send>
  bool send_due(std::uint64_t arrived, bool holds, Send send) {
    const auto is_due = [&](const Waiting& one) { return one.after_write <= arrived && (!holds || one.is_last); };
    ++round_;
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
      Waiting& one = waiting_[i];
      if (one.message.kind != MessageKind::kNotify || !is_due(one)) continue;
      Newest& newest = newest_[one.message.channel];
      if (newest.round == round_) {
        supersede(one.message, waiting_[newest.idx].message);
        waiting_[newest.idx].is_superseded = true;
      }
      newest = {round_, i};
    }
    ++round_;
    std::size_t num_kept = 0;
    const std::size_t num_waiting = waiting_.size();
    for (std::size_t i = 0; i < num_waiting; ++i) {
      const Waiting one = waiting_[i];
      if (is_due(one) && (!one.is_last || num_kept == 0)) {
        if (!one.is_superseded) send(one.message, one.is_last);
        continue;
      }
      if (one.message.kind == MessageKind::kNotify) newest_[one.message.channel] = {round_, num_kept};
      waiting_[num_kept++] = one;
    }
    waiting_.resize(num_kept);
    return num_kept < num_waiting;
  }

 private:
  struct Waiting {
    Message message;
    std::uint64_t after_write = 0;
    bool is_last = false;
    bool is_superseded = false;
  };
  /// Newest notify of a channel, if it was entered in this round.
  struct Newest {
    std::uint64_t round = 0;
    std::size_t idx = 0;
  };

  static void supersede(Message& message, const Message& other) {
    message.value = std::max(message.value, other.value);
  }

  std::vector<Waiting> waiting_;
  std::vector<Newest> newest_;  // by channel
  std::uint64_t round_ = 1;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_WAITING_HPP
