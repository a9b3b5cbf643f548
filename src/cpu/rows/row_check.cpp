#include "cpu/rows/row_check.hpp"

#include <fmt/format.h>

#include <cstring>

#include "core/corrupt_rows.hpp"
#include "plan/checksum_table.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

constexpr std::size_t kChecksumBytes = to_size(plan::kChecksumWords) * sizeof(std::int32_t);

#if defined(__x86_64__)

/// numeric::sum_words with vectors of four words, twice as fast.
__attribute__((target("avx2"))) std::uint64_t sum_words_avx2(const std::byte* data, std::size_t num_bytes,
                                                             std::size_t offset_bytes) {
  return numeric::sum_words(data, num_bytes, offset_bytes);
}

std::uint64_t sum_words(const std::byte* data, std::size_t num_bytes, std::size_t offset_bytes) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  return has_avx2 ? sum_words_avx2(data, num_bytes, offset_bytes) : numeric::sum_words(data, num_bytes, offset_bytes);
}

#else

using numeric::sum_words;

#endif

/// Bytes of the weights that return with a row.
std::size_t weights_row_bytes(const CombineCall& call, const CpuRouting& routing) {
  if (!call.weights.present()) return 0;
  return (routing.layout == Layout::kTokens ? to_size(routing.num_topk) : 1) * sizeof(float);
}

}  // namespace

std::atomic<void (*)(const CheckedRow&)> damage_for_tests{nullptr};

std::uint64_t row_checksum(const numeric::RowIdentity& identity, const RowParts& parts) {
  return numeric::checksum_start(identity) + sum_words(parts.payload.data(), parts.payload.size(), 0) +
         sum_words(parts.tail.data(), parts.tail.size(), parts.payload.size());
}

std::size_t covered_bytes(std::size_t record_bytes) { return record_bytes - kChecksumBytes; }

std::uint64_t checksum_in(const std::byte* record, std::size_t record_bytes) {
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, record + covered_bytes(record_bytes), sizeof checksum);
  return checksum;
}

void put_checksum(std::byte* record, std::size_t record_bytes, std::uint64_t checksum) {
  std::memset(record + covered_bytes(record_bytes), 0, kChecksumBytes);
  std::memcpy(record + covered_bytes(record_bytes), &checksum, sizeof checksum);
}

Status RowCheck::result(const call::CallSync& sync) const {
  if (num_wrong_ == 0) return {};
  const WrongRow& row = first_.row;
  return Status(
      ErrorCode::kDataCorrupt,
      fmt::format("{} (call {}): {} is not as it was sent: its checksum is {:016x}, expected {:016x}; hop {}; "
                  "{} of {} rows that rank {} checked are wrong, and this is the first; {}",
                  sync.operation(), sync.peers().call(), row.row, first_.observed, first_.expected, row.hop, num_wrong_,
                  num_checked_, sync.rank(), kCorruptAdvice),
      row.sender);
}

void seal_records(const DispatchCall& call, const numeric::RowIdentity& first, std::size_t record_bytes,
                  std::byte* records) {
  numeric::RowIdentity identity = first;
  for (std::int64_t token = 0; token < call.x.num_rows; ++token, records += record_bytes) {
    identity.row = static_cast<std::int32_t>(token);
    put_checksum(records, record_bytes,
                 row_checksum(identity, {{call.x.row(token), to_size(call.x.row_bytes)},
                                         {records, covered_bytes(record_bytes)}}));
  }
}

void check_received_rows(const ReceivedRows& received, RowCheck& check) {
  const CpuRouting& routing = received.routing;
  for (std::int64_t row = 0; row < routing.num_used_rows; ++row) {
    const std::byte* const record = record_of_row(row, routing, received.record_bytes, received.sources);
    if (record == nullptr) continue;
    const std::span<const std::byte> payload(received.call.out_x.row(row), to_size(received.call.out_x.row_bytes));
    let_tests_damage({CheckedPlace::kFinalRow, received.rank, row, payload});
    const std::int32_t source = routing.source_table[to_size(row) * 2];
    const std::int32_t token = routing.source_table[to_size(row) * 2 + 1];
    const std::uint64_t observed =
        row_checksum({received.call_number, source, token}, {payload, {record, covered_bytes(received.record_bytes)}});
    check.compare(observed, checksum_in(record, received.record_bytes), [&]() -> RowCheck::WrongRow {
      const int sender = received.forwarder_of ? received.forwarder_of(source) : source;
      return {fmt::format("row {} (token {} of rank {})", row, token, source),
              sender == source ? fmt::format("rank {} -> rank {}", source, received.rank)
                               : fmt::format("rank {} -> forwarder rank {} -> rank {}, after the forwarder's check",
                                             source, sender, received.rank),
              sender};
    });
  }
}

Status publish_checksums(const CombineCall& call, const CpuRouting& routing, const Context& context,
                         node::CallDescriptor& descriptor) {
  const auto num_rows = to_size(routing.num_used_rows);
  const std::size_t table_bytes = plan::ChecksumTable::at(nullptr, num_rows).size_bytes;
  if (table_bytes == 0) return {};
  Result<std::byte*> room = context.staging.checksums(table_bytes);
  if (!room.ok()) return room.status();
  const plan::ChecksumTable table = plan::ChecksumTable::at(*room, num_rows);
  const std::size_t weights_bytes = weights_row_bytes(call, routing);
  const auto* const weights = static_cast<const std::byte*>(call.weights.data);
  numeric::RowIdentity identity{next_call(context.peers()), context.peers().rank(), 0};
  for (std::size_t row = 0; row < num_rows; ++row) {
    const auto row_idx = static_cast<std::int64_t>(row);
    identity.row = static_cast<std::int32_t>(row_idx);
    table.rows[row] = !routing.holds_token(row_idx)
                          ? 0
                          : row_checksum(identity, {{call.x.row(row_idx), to_size(call.x.row_bytes)},
                                                    {weights + row * weights_bytes, weights_bytes}});
  }
  descriptor.records = context.peers().locate(*room, 1, static_cast<std::int64_t>(table_bytes), 0);
  return {};
}

const std::uint64_t* find_checksums(const node::Peers& peers, const node::CallDescriptor& descriptor, int rank,
                                    std::int64_t num_rows) {
  const std::size_t table_bytes = plan::ChecksumTable::at(nullptr, to_size(num_rows)).size_bytes;
  std::byte* const table = peers.resolve(descriptor.records, rank, {1, static_cast<std::int64_t>(table_bytes)});
  return table == nullptr ? nullptr : plan::ChecksumTable::at(table, to_size(num_rows)).rows;
}

void check_held_row(const CombineCall& call, const CpuRouting& routing, std::uint64_t call_number, const HeldRows& held,
                    std::int64_t row, RowCheck& check) {
  const std::span<const std::byte> payload(held.rows.rows + row * held.rows.stride_bytes, to_size(call.x.row_bytes));
  const std::size_t weights_bytes = weights_row_bytes(call, routing);
  const std::byte* weights = reinterpret_cast<const std::byte*>(held.rows.weights);
  if (weights != nullptr) weights += to_size(row) * weights_bytes;
  let_tests_damage({CheckedPlace::kHeldRow, held.reader, row, payload});
  const numeric::RowIdentity identity{call_number, held.holder, static_cast<std::int32_t>(row)};
  check.compare(row_checksum(identity, {payload, {weights, weights_bytes}}), held.checksums[row],
                [&]() -> RowCheck::WrongRow {
                  return {fmt::format("row {} of rank {}", row, held.holder),
                          fmt::format("rank {} -> rank {}", held.holder, held.reader), held.holder};
                });
}

}  // namespace ferry::cpu
