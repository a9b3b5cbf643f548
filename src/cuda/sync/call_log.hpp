#ifndef FERRY_CUDA_SYNC_CALL_LOG_HPP
#define FERRY_CUDA_SYNC_CALL_LOG_HPP

/// What each rank's host says about its calls, where the peers' hosts can read it. Kernels compare hashes only; when
/// those differ, the hosts look up the records and all find the same words.
///
///   field    writer  readers  order                        publishes
///   number   owner   all      store release / load acquire  record (checked again after it was copied)
///
/// Owners run ahead of readers: a record that was written over is reported in general words.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "call/call_sync.hpp"
#include "core/agreement.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

class Tickets {
 public:
  /// The first thing that every rank takes from its arena, so that it lies at the same place in all.
  static Result<Tickets> create(call::CallSync& crew);

  /// Shows `record` to the peers; its number.
  std::int64_t post(const CallRecord& record);
  /// Record `number` of `rank`; nothing if it was written over.
  std::optional<CallRecord> find(int rank, std::int64_t number) const;

 private:
  /// Calls that a rank's host can be ahead of a peer that looks back.
  static constexpr std::size_t kNumSlots = 64;
  struct Slot {
    std::atomic<std::int64_t> number{0};
    CallRecord record;
  };
  struct Ring {
    std::array<Slot, kNumSlots> slots;
  };

  Tickets(call::CallSync& crew, std::size_t offset) : crew_(&crew), offset_(offset) {}
  Ring& ring(int rank) const;

  call::CallSync* crew_;
  std::size_t offset_;
  std::int64_t last_number_ = 0;
};

/// What all ranks must give alike, in one word that is never 0.
std::uint64_t agreement_word(const CallRecord& record);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CALL_LOG_HPP
