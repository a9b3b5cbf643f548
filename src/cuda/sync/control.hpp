#ifndef FERRY_CUDA_SYNC_CONTROL_HPP
#define FERRY_CUDA_SYNC_CONTROL_HPP

/// Control words of a rank, at the start of its arena: all data that ranks send each other on the device except rows
/// and their tables. All flags of the CUDA backend are here.
///
/// Every call has an epoch (from 1), counted on the device so that graph replays count too. All ranks make the same
/// calls in the same order, so their epochs agree. Flags only grow; only once in 2^32 calls are words with half of an
/// epoch cleared or aged (rank_sync.cuh). Entries, progress and staged have room for half of an epoch, which names the
/// epoch that they belong to.
///
///   field             writer     order               publishes
///   entries[s]        rank s     relaxed / acquire   s's outputs and staging may be written, its inputs read; and the
///                                                    words of its EntryMessage, each with the epoch's lower half
///   progress[s]       rank s     release / acquire   rows and records that s has written here: epoch << 32 | rows
///                                                    so far (rows_reported in chunks.cuh)
///   staged[s][b]      rank s     relaxed / acquire   rows that staging block b of s has staged for this rank:
///                                                    epoch << 32 | rounds so far (staged.cuh)
///   rail_verdicts[s]  rank s     relaxed / acquire   over several nodes: whether the rail peers of s make its call,
///                                                    and the records in its RailLog of those that do not: epoch << 1
///                                                    | 1 if all make it
///   done[s]           rank s     release / acquire   s writes and reads no more data here in this epoch; used by
///                                                    route and by calls that are refused
///   block_done[s][b]  rank s     relaxed / acquire   the same for block b of s's kernel, in dispatch and combine; s's
///                                                    entry holds the number of blocks
///   headers[..][s]    rank s     relaxed / acquire   in slot epoch % 2: the words of its CountsHeader, each with the
///                                                    epoch's lower half; those of source_offset also that s's source
///                                                    table may be written
///   counts[..][s]     rank s     relaxed             themselves, each with the epoch's lower half
///   counts_ready[s]   rank s     relaxed / acquire   s routes in this epoch
///   local             this rank  device scope        see the kernels
///
/// This rank reads all of them. All except `local` are written by st.release.sys, or by fence.acq_rel.sys and
/// st.relaxed.sys, and read by ld.acquire.sys. No fence precedes counts, counts_ready and the words of headers other
/// than source_offset, which publish only themselves; counts are read by ld.relaxed.sys. Entries, headers and counts
/// need no flags of their own, and so no second trip over the link: each word is half payload, half epoch, and one
/// 8-byte store writes both (PTX ISA, "Memory Consistency Model", scalar accesses).
///
/// A route is one epoch: counts first, then every rank writes its part of each receiver's source table, then done. If a
/// receiver's rows do not fit the table that it announced with its counts, it announces another table in its entry of
/// the same epoch, and the others wait for that entry before they write to the table.
///
/// One slot per entry, and per verdict, is enough: s writes the entry of epoch e + 1 only after it saw that this rank
/// was done with e, which this rank sends after it has read s's entry of e. Routes that are refused because of their
/// rows do not end that way. Therefore counts alternate between two slots: s writes the counts of e + 2 only after it
/// has finished e + 1, in which this rank took part after reading the counts of e.

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"
#include "plan/count_columns.hpp"

namespace ferry::cuda {

/// Upper bound of E: a block counts all experts in shared memory (eight warps, 4 bytes each, of 227 KiB).
inline constexpr std::int64_t kMaxExperts = 4096;
/// Upper bound of R: tables of this many peers fit a block's shared memory many times over.
inline constexpr int kMaxRanks = 128;
/// Maximum number of chunks in which a rank reports the progress of its tokens.
inline constexpr int kMaxChunks = 1024;
/// Upper bound of the number of blocks of a kernel that writes to peers or reads from them; exceeds the number of
/// multiprocessors of any GPU.
inline constexpr int kMaxCallBlocks = 256;

/// Bits of EntryMessage::flags.
inline constexpr std::int64_t kRowsStaged = 1;    ///< rows_offset is staging; dispatch: indexed by token row
inline constexpr std::int64_t kTablesDirect = 2;  ///< dispatch: scales, ids and weights go straight to the outputs
inline constexpr std::int64_t kWideIds = 4;       ///< dispatch: ids_offset holds i64
/// Combine, with kRowsStaged: the bits from this one upwards hold the number of staging blocks.
inline constexpr int kStagersShift = 8;

/// A rank's part in a call, as it sends it to every peer. Offsets are in the rank's own arena. Meaning of the first
/// two:
///
///   call       rows_offset              tables_offset
///   dispatch   destination of its rows  destination of its token records, if it receives any
///   combine    location of its rows     location of the weights of its rows
///   route      not used                 location of its source table, if its rows do not fit the announced one
///
/// Exchanges between nodes: weights_offset is the location of weights; in the first one of a call tables_offset is the
/// RailLog, and scales_offset the destination of token records.
struct EntryMessage {
  std::uint64_t agreement = 0;     ///< hash of arguments that must agree; 0: this rank refuses the call
  std::int64_t record_number = 0;  ///< of the call in the host's CallLog
  std::int64_t rows_offset = 0;
  std::int64_t rows_stride = 0;  ///< bytes
  std::int64_t tables_offset = 0;
  std::int64_t flags = 0;
  std::int64_t scales_offset = 0;  ///< on one node used only with kTablesDirect, as are the next three
  std::int64_t scales_stride = 0;  ///< bytes between rows; a row is contiguous
  std::int64_t ids_offset = 0;
  std::int64_t weights_offset = 0;
  std::int64_t num_blocks = 0;  ///< blocks of the kernel, and so words of block_done
};
/// Words of 4 bytes, one per lane of a warp.
inline constexpr int kEntryWords = sizeof(EntryMessage) / sizeof(std::uint32_t);
inline constexpr int kEntrySlotWords = 32;
static_assert(kEntryWords <= kEntrySlotWords);

/// Header that a rank sends with its counts.
struct alignas(16) CountsHeader {
  std::int64_t source_offset;  ///< offset in its arena of its source table, which may be written
  std::uint64_t epoch;         ///< of the call; another epoch means that the rank made another call
  std::uint64_t agreement;
  std::int64_t record_number;
  std::int64_t max_recv_rows;  ///< 0: not bounded
  std::int64_t num_tokens;     ///< T of that rank
  std::int64_t bad_entry;      ///< index in [T, K] of the first id that is no expert; -1: all ids are valid
  std::int64_t bad_id;
  std::int64_t repeats;      ///< 1: some token names an expert twice
  std::int64_t source_rows;  ///< rows that its source table has room for
  std::uint64_t homes_hash;  ///< hash of a placement in GPU memory, else 0
  std::int64_t unused;
};
/// Words of 4 bytes, the unit in which the header is sent.
inline constexpr int kCountsHeaderWords = sizeof(CountsHeader) / sizeof(std::uint32_t);
static_assert(kCountsHeaderWords % 2 == 0, "posted two words at a time");

/// This rank's own words.
struct LocalState {
  std::uint64_t epoch;    ///< number of finished calls
  std::uint64_t outcome;  ///< outcome of the current call: epoch << 2 | device::Outcome
  std::uint32_t broken;   ///< a wait timed out or was stopped; every kernel then ends at once
  std::uint32_t num_chunks_sent;
  std::uint32_t num_blocks_done;  ///< blocks whose part in the kernel is complete
  std::uint32_t num_receivers_done;
  std::uint32_t num_items_claimed;           ///< claimed items of a combine's work; 0 between calls
  std::uint32_t chunk_arrivals[kMaxChunks];  ///< warps that have finished their part of a chunk
  // The same sums as WaitTimes, in memory to which kernels add without going over PCIe.
  std::uint64_t wait_ns[kMaxRanks];
  std::uint64_t step_wait_ns[kMaxRanks];
  std::uint64_t counted_until_ns[kMaxRanks];  ///< see wait_count.cuh
  // By rank of the group, for calls whose RankParams are of the group.
  std::uint64_t group_wait_ns[kMaxRanks];
  std::uint64_t group_counted_until_ns[kMaxRanks];
};

struct Control {
  std::uint64_t* entries = nullptr;        ///< [R][kEntrySlotWords] epoch << 32 | word of the EntryMessage
  std::uint64_t* progress = nullptr;       ///< [R]
  std::uint64_t* staged = nullptr;         ///< [R][kMaxCallBlocks]
  std::uint64_t* rail_verdicts = nullptr;  ///< [R]
  std::uint64_t* done = nullptr;           ///< [R]
  std::uint64_t* block_done = nullptr;     ///< [R][kMaxCallBlocks]
  std::uint64_t* counts_ready = nullptr;   ///< [R]
  std::uint64_t* headers = nullptr;        ///< [2][R][kCountsHeaderWords] epoch << 32 | word of the CountsHeader
  std::uint64_t* counts = nullptr;         ///< [2][R][counts_stride(R)] epoch << 32 | count; rows of plan::CountColumns
  LocalState* local = nullptr;
  std::size_t size_bytes = 0;

  /// Distance between the counts of one rank and the next, in words.
  FERRY_HOST_DEVICE static constexpr std::size_t counts_stride(std::size_t num_ranks) {
    return static_cast<std::size_t>(
        plan::CountColumns::of(static_cast<int>(num_ranks), static_cast<int>(kMaxExperts)).size);
  }

  FERRY_HOST_DEVICE static constexpr Control at(std::byte* base, std::size_t num_ranks) {
    plan::Carver carver(base);
    Control control;
    control.entries = carver.take<std::uint64_t>(num_ranks * kEntrySlotWords);
    control.progress = carver.take<std::uint64_t>(num_ranks);
    control.staged = carver.take<std::uint64_t>(num_ranks * kMaxCallBlocks);
    control.rail_verdicts = carver.take<std::uint64_t>(num_ranks);
    control.done = carver.take<std::uint64_t>(num_ranks);
    control.block_done = carver.take<std::uint64_t>(num_ranks * kMaxCallBlocks);
    control.counts_ready = carver.take<std::uint64_t>(num_ranks);
    control.headers = carver.take<std::uint64_t>(2 * num_ranks * kCountsHeaderWords);
    control.counts = carver.take<std::uint64_t>(2 * num_ranks * counts_stride(num_ranks));
    control.local = carver.take<LocalState>(1);
    control.size_bytes = carver.used_bytes();
    return control;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CONTROL_HPP
