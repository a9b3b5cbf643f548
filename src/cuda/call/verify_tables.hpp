#ifndef FERRY_CUDA_CALL_VERIFY_TABLES_HPP
#define FERRY_CUDA_CALL_VERIFY_TABLES_HPP

/// Memory of the checks of one call (GroupOptions::verify): sizes and pointers.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/report.hpp"
#include "plan/carver.hpp"

namespace ferry::cuda {

/// Checksum of a row that a source sends, for the receiver to find: one entry for each destination of a token, of which
/// those with a row of their own have a rank.
struct alignas(16) SealedEntry {
  std::uint64_t checksum;
  std::int32_t row;   ///< in the receiver's output
  std::int32_t rank;  ///< -1: none
};

/// This rank's own words of a check.
struct VerifyState {
  RouteSummary gate;          ///< the Routing's summary for the combine after the check; not valid: it was refused
  std::uint64_t num_wrong;    ///< rows
  std::uint64_t first_wrong;  ///< dispatch: row; combine: entry in [T, K]
  std::uint32_t num_blocks_done;
};

/// Tables of one call; peers read the checksums.
struct VerifyTables {
  VerifyState* state = nullptr;
  SealedEntry* entries = nullptr;      ///< dispatch: [T, K]
  std::uint64_t* checksums = nullptr;  ///< combine: [rows]
  std::size_t size_bytes = 0;

  static constexpr VerifyTables at(std::byte* base, std::size_t num_entries, std::size_t num_rows) {
    plan::Carver carver(base);
    VerifyTables tables;
    tables.state = carver.take<VerifyState>(1);
    tables.entries = carver.take<SealedEntry>(num_entries);
    tables.checksums = carver.take<std::uint64_t>(num_rows);
    tables.size_bytes = carver.used_bytes();
    return tables;
  }
  static constexpr VerifyTables of_dispatch(std::byte* base, std::size_t num_entries) {
    return at(base, num_entries, 0);
  }
  static constexpr VerifyTables of_combine(std::byte* base, std::size_t num_rows) { return at(base, 0, num_rows); }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_VERIFY_TABLES_HPP
