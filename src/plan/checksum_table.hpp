#ifndef FERRY_PLAN_CHECKSUM_TABLE_HPP
#define FERRY_PLAN_CHECKSUM_TABLE_HPP

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"
#include "plan/host_device.hpp"

namespace ferry::plan {

/// Checksums of a rank's rows (GroupOptions::verify), as the rank publishes them to the ranks that read the rows.
struct ChecksumTable {
  std::uint64_t* rows = nullptr;  ///< [rows]
  std::size_t size_bytes = 0;

  /// Pointers into `base`; with a null base only `size_bytes`.
  FERRY_HOST_DEVICE static constexpr ChecksumTable at(std::byte* base, std::size_t num_rows) {
    Carver carver(base);
    ChecksumTable table;
    table.rows = carver.take<std::uint64_t>(num_rows);
    table.size_bytes = carver.used_bytes();
    return table;
  }
};

/// Words of 4 bytes that CPU ranks add to the end of every token record of a group with GroupOptions::verify: the
/// checksum of the token in the first two, then padding to 16 bytes.
inline constexpr int kChecksumWords = 4;

}  // namespace ferry::plan

#endif  // FERRY_PLAN_CHECKSUM_TABLE_HPP
