#ifndef FERRY_CUDA_SYNC_CALL_LOG_HPP
#define FERRY_CUDA_SYNC_CALL_LOG_HPP

/// Latest call records of each rank, readable by the peers' hosts. Kernels compare only hashes; if those differ, the
/// hosts read the records, and all of them derive the same message.
///
///   field    writer  readers  order                        publishes
///   number   owner   all      store release / load acquire  record (checked again after it was copied)
///
/// Owners may run ahead of readers: a record that has been overwritten is reported in general terms.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "core/agreement.hpp"
#include "ferry/status.hpp"
#include "node/peers.hpp"

namespace ferry::cuda {

class CallLog {
 public:
  /// Must be called before any other allocation from the host arena, on every rank, so that the offset is the same in
  /// all. `last_number`: of this rank's log before, in a group that is renewed, whose captured calls name its records.
  static Result<CallLog> create(node::Peers& peers, std::int64_t last_number = 0);
  std::int64_t last_number() const { return last_number_; }
  /// Gives the next record the number behind this one: ranks' numbers agree for the same calls.
  void count_from(std::int64_t last_number) { last_number_ = last_number; }

  /// Publishes `record` to the peers; returns its number.
  std::int64_t append(const CallRecord& record);
  /// Copies record `number` of `rank`. False if it was overwritten; `record` may then hold anything.
  bool copy(int rank, std::int64_t number, CallRecord* record) const;
  /// The same; nullopt if it was overwritten.
  std::optional<CallRecord> find(int rank, std::int64_t number) const;

  struct Difference {
    int rank = 0;  ///< this rank
    Operation mine{};
    Operation theirs{};
  };
  /// First calls with the same number in the logs of this rank and of `peer` that are of different kinds. Used for
  /// messages only: numbers differ between ranks after a rank alone has captured calls, or made calls on a Routing that
  /// was refused.
  std::optional<Difference> find_difference(int peer) const;

 private:
  /// Most calls by which a rank's host may be ahead of a peer that looks up its record.
  static constexpr std::size_t kNumSlots = 64;
  struct Slot {
    std::atomic<std::int64_t> number{0};
    CallRecord record;
  };
  struct Ring {
    std::array<Slot, kNumSlots> slots;
  };

  CallLog(node::Peers& peers, std::size_t offset, std::int64_t last_number)
      : peers_(&peers), offset_(offset), last_number_(last_number) {}
  Ring& ring(int rank) const;
  std::int64_t last_number_of(int rank) const;

  node::Peers* peers_;
  std::size_t offset_;
  std::int64_t last_number_;
};

/// Hash of all arguments that every rank must pass alike; 0 if and only if the record is of a failure.
std::uint64_t agreement_word(const CallRecord& record);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CALL_LOG_HPP
