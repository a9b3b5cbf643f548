#ifndef FERRY_CPU_ROWS_TOKEN_RECORDS_HPP
#define FERRY_CPU_ROWS_TOKEN_RECORDS_HPP

/// Data that a dispatch sends with the payload. The source packs one record per token into its arena; receivers read
/// the records of their rows and unpack them into outputs of any type and stride.

#include <span>

#include "core/backend.hpp"
#include "cpu/context/routing.hpp"
#include "plan/token_record.hpp"

namespace ferry::cpu {

/// Record format that a call needs; the same on every rank, because all ranks agree on the options that determine it.
/// `verify`: records end with the checksum of their token (rows/row_check.hpp).
plan::TokenRecord record_format(const DispatchCall& call, bool verify);

/// Packs this rank's T records of `format` at `to`, without checksums.
void pack_records(const DispatchCall& call, const CpuRouting& routing, const plan::TokenRecord& format, std::byte* to);

/// Location of the records of a source rank.
struct RecordSource {
  const std::byte* records = nullptr;  ///< null if the rank sent none
  /// [num_used_rows] index of each row's record; null: the index is the token's number
  const std::int32_t* record_of_row = nullptr;
};

/// Record of the token in a used row of this rank; null if the row holds no token. `sources` by rank.
const std::byte* record_of_row(std::int64_t row, const CpuRouting& routing, std::size_t record_bytes,
                               std::span<const RecordSource> sources);

/// Unpacks the records of `format` of all used rows of this rank. `sources` by rank.
void unpack_records(const DispatchCall& call, const CpuRouting& routing, const plan::TokenRecord& format,
                    std::span<const RecordSource> sources);

/// Fills outputs that do not depend on peers: `source`, ids of unused rows, and, if requested, zeros in rows without a
/// token.
void fill_local_outputs(const DispatchCall& call, const CpuRouting& routing);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_TOKEN_RECORDS_HPP
