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
plan::TokenRecord record_format(const DispatchCall& call);

/// Packs this rank's T records at `to`.
void pack_records(const DispatchCall& call, const CpuRouting& routing, std::byte* to);

/// Location of the records of a source rank.
struct RecordSource {
  const std::byte* records = nullptr;  ///< null if the rank sent none
  /// [num_used_rows] index of each row's record; null: the index is the token's number
  const std::int32_t* record_of_row = nullptr;
};

/// Unpacks the records of all used rows of this rank. `sources` by rank.
void unpack_records(const DispatchCall& call, const CpuRouting& routing, std::span<const RecordSource> sources);

/// Fills outputs that do not depend on peers: `source`, ids of unused rows, and, if requested, zeros in rows without a
/// token.
void fill_local_outputs(const DispatchCall& call, const CpuRouting& routing);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_TOKEN_RECORDS_HPP
