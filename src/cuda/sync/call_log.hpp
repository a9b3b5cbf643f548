#ifndef FERRY_CUDA_SYNC_CALL_LOG_HPP
#define FERRY_CUDA_SYNC_CALL_LOG_HPP

/// Each rank's latest call records, where the peers' hosts can read them. Kernels compare hashes only; when those
/// differ, the hosts read the records and all derive the same message from them.
///
///   field    writer  readers  order                        publishes
///   number   owner   all      store release / load acquire  record (checked again after it was copied)
///
/// Owners run ahead of readers: a record that has been overwritten is reported in general terms.

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
  /// Must be the first thing that every rank takes from its host arena, so that the offset is the same in all.
  static Result<CallLog> create(node::Peers& peers);

  /// Publishes `record` to the peers; returns its number.
  std::int64_t append(const CallRecord& record);
  /// Record `number` of `rank`; nothing if it was overwritten.
  std::optional<CallRecord> find(int rank, std::int64_t number) const;

  struct Difference {
    int rank = 0;  ///< this one
    Operation mine{};
    Operation theirs{};
  };
  /// The first calls in both logs, this rank's and that of `peer`, which have the same number and are not the same kind
  /// of call. Ranks number alike unless one alone has captured calls or made some on a Routing that was refused, so
  /// this is for messages.
  std::optional<Difference> find_difference(int peer) const;

 private:
  /// Calls by which a rank's host may be ahead of a peer that looks up its record.
  static constexpr std::size_t kNumSlots = 64;
  struct Slot {
    std::atomic<std::int64_t> number{0};
    CallRecord record;
  };
  struct Ring {
    std::array<Slot, kNumSlots> slots;
  };

  CallLog(node::Peers& peers, std::size_t offset) : peers_(&peers), offset_(offset) {}
  Ring& ring(int rank) const;
  std::int64_t last_number_of(int rank) const;

  node::Peers* peers_;
  std::size_t offset_;
  std::int64_t last_number_ = 0;
};

/// Hash of everything that all ranks must pass alike; 0 exactly for a record of a failure.
std::uint64_t agreement_word(const CallRecord& record);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CALL_LOG_HPP
