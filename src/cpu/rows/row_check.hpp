#ifndef FERRY_CPU_ROWS_ROW_CHECK_HPP
#define FERRY_CPU_ROWS_ROW_CHECK_HPP

/// Checksums of rows on CPU ranks (GroupOptions::verify). In a dispatch the record of a token ends with the checksum of
/// its payload and of the record before it; whoever holds the row compares the two. In a combine each rank publishes a
/// table with the checksums of its rows, and the ranks that sum the rows compare what they read.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/rows/combine_inputs.hpp"
#include "cpu/rows/token_records.hpp"
#include "numeric/row_checksum.hpp"

namespace ferry::cpu {

/// Bytes of a row in the order in which its checksum counts them. `payload`: a multiple of 16 bytes; `tail`: record or
/// weights.
struct RowParts {
  std::span<const std::byte> payload;
  std::span<const std::byte> tail{};
};
std::uint64_t row_checksum(const numeric::RowIdentity& identity, const RowParts& parts);

/// Checksum at the end of a record of `record_bytes`.
std::uint64_t checksum_in(const std::byte* record, std::size_t record_bytes);
void put_checksum(std::byte* record, std::size_t record_bytes, std::uint64_t checksum);
/// Bytes of such a record that its checksum covers.
std::size_t covered_bytes(std::size_t record_bytes);

/// Rows that a call of this rank has checked.
class RowCheck {
 public:
  /// A wrong row, in words: "row 12 (token 5 of rank 0)", "rank 0 -> rank 1".
  struct WrongRow {
    std::string row;
    std::string hop;
    int sender = -1;  ///< rank at the beginning of the hop
  };

  /// Begins with no rows.
  void clear() { *this = RowCheck(); }
  bool all_right() const { return num_wrong_ == 0; }
  /// Counts a row. `describe` returns a WrongRow; only the first wrong row is described.
  template <typename Describe>
  void compare(std::uint64_t observed, std::uint64_t expected, Describe describe) {
    ++num_checked_;
    if (observed == expected) return;
    if (num_wrong_++ == 0) first_ = {describe(), observed, expected};
  }
  /// Ok if all rows were right. Does not break the group.
  /// @errors kDataCorrupt
  Status result(const call::CallSync& sync) const;

 private:
  struct First {
    WrongRow row{};
    std::uint64_t observed = 0;
    std::uint64_t expected = 0;
  };
  std::int64_t num_checked_ = 0;
  std::int64_t num_wrong_ = 0;
  First first_;
};

/// Number of the call that the rank is about to make, or is making: part of every checksum.
inline std::uint64_t next_call(const node::Peers& peers) { return peers.call() + 1; }

/// Puts the checksums of this rank's T tokens into its packed records.
void seal_records(const DispatchCall& call, const numeric::RowIdentity& first, std::size_t record_bytes,
                  std::byte* records);

/// Rows that a dispatch has written on this rank.
struct ReceivedRows {
  const DispatchCall& call;
  const CpuRouting& routing;
  std::size_t record_bytes = 0;
  std::span<const RecordSource> sources;  ///< by rank
  std::uint64_t call_number = 0;
  int rank = 0;  ///< this rank
  std::function<int(int)>
      forwarder_of{};  ///< the rank that has forwarded a source's rows, the source itself if none has
};
void check_received_rows(const ReceivedRows& rows, RowCheck& check);

/// Publishes the checksums of the rows, with their weights, that this rank returns in a combine.
/// @errors those of Staging, without the name of the call
Status publish_checksums(const CombineCall& call, const CpuRouting& routing, const Context& context,
                         node::CallDescriptor& descriptor);
/// Table that `rank` published in `descriptor`, with at least `num_rows` entries; null if it is outside its memory.
const std::uint64_t* find_checksums(const node::Peers& peers, const node::CallDescriptor& descriptor, int rank,
                                    std::int64_t num_rows);
/// Rows that a rank holds in a combine, as another rank of its node reads them.
struct HeldRows {
  CombineRows rows{};
  const std::uint64_t* checksums = nullptr;  ///< [rows]; null if the group does not verify them
  int holder = 0;
  int reader = 0;
};
/// Checks a row of the current call before it is summed.
void check_held_row(const CombineCall& call, const CpuRouting& routing, std::uint64_t call_number, const HeldRows& held,
                    std::int64_t row, RowCheck& check);

/// Place of a row whose checksum is about to be computed, for tests that damage it there.
enum class CheckedPlace {
  kFinalRow,  ///< dispatch: the output of the receiver
  kRing,      ///< dispatch over nodes: the ring of the forwarder
  kHeldRow,   ///< combine: the input of the rank that holds it
  kNodeSum,   ///< combine over nodes: a forwarder's sum in the ring of the source
  kWeights,   ///< weighted combine over nodes: a token's weights on the forwarder
};
struct CheckedRow {
  CheckedPlace place = CheckedPlace::kFinalRow;
  int rank = 0;          ///< the rank that checks
  std::int64_t row = 0;  ///< kRing, kNodeSum, kWeights: the item
  std::span<const std::byte> bytes;
};
/// Called with every row before it is checked, if tests have set it; not while calls run.
extern std::atomic<void (*)(const CheckedRow&)> damage_for_tests;
inline void let_tests_damage(const CheckedRow& row) {
  if (auto* const damage = damage_for_tests.load(std::memory_order_acquire)) damage(row);
}

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_ROW_CHECK_HPP
