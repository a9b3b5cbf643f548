#ifndef FERRY_CUDA_SYNC_CONTROL_HPP
#define FERRY_CUDA_SYNC_CONTROL_HPP

/// The control words of a rank, at the start of its arena: everything that ranks send each other on the device except
/// rows and their tables. All flags of the CUDA backend are here.
///
/// Every call has an epoch (from 1), counted on the device so that graph replays count too; all ranks make the same
/// calls in the same order, so their epochs agree. Flags only grow and are never reset; entries, progress and staged,
/// which have room for half of an epoch, say whether they are of this one.
///
///   field             writer     order               publishes
///   entries[s]        rank s     relaxed / acquire   s's outputs and staging may be written, its inputs read; and the
///                                                    words of its EntryMessage, each with the epoch's lower half
///   progress[s]       rank s     release / acquire   rows and records that s has written here: epoch << 32 | rows
///                                                    so far (rows_reported in chunks.cuh)
///   staged[s][b]      rank s     relaxed / acquire   rows that block b of those that stage has staged for this rank:
///                                                    epoch << 32 | rounds so far (staged.cuh)
///   done[s]           rank s     release / acquire   s writes and reads nothing here any more in this epoch: of route,
///                                                    and of calls that are refused
///   block_done[s][b]  rank s     relaxed / acquire   the same of block b of s's kernel, in dispatch and combine; s's
///                                                    entry says how many blocks there are
///   headers[..][s]    rank s     relaxed / acquire   in slot epoch % 2: the words of its CountsHeader, each with the
///                                                    epoch's lower half; those of source_offset also that s's source
///                                                    table may be written
///   counts[..][s]     rank s     relaxed             themselves, each with the epoch's lower half
///   counts_ready[s]   rank s     relaxed / acquire   s routes in this epoch
///   local             this rank  device scope        see the kernels
///
/// This rank reads all of them; all but the last are st.release.sys, or fence.acq_rel.sys and st.relaxed.sys, and
/// ld.acquire.sys. No fence comes before counts, counts_ready and the words of headers other than source_offset, which
/// publish nothing but themselves; counts are ld.relaxed.sys. Entries, headers and counts need no flags of their own,
/// and so no second trip over the link: each of their words is half payload, half epoch, and one 8-byte store writes
/// both (PTX ISA, "Memory Consistency Model", scalar accesses).
///
/// A route is one epoch: counts, then every rank writes its part of each receiver's source table, then done. Where a
/// receiver's rows do not fit the table that it announced with its counts, it announces another in its entry of the
/// same epoch, and the others wait for that before they write there.
///
/// One slot per entry is enough: s writes the entry of epoch e + 1 only after it saw that this rank was done with e,
/// which this rank sends after it has read s's entry of e. Routes that are refused for their rows have no such end of
/// call; so counts alternate between two slots, and s writes those of e + 2 only after it has finished e + 1, in which
/// this rank took part after reading e.

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"
#include "plan/count_columns.hpp"

namespace ferry::cuda {

/// Bound on E here: a block counts all experts in shared memory (eight warps, 4 bytes each, of 227 KiB).
inline constexpr std::int64_t kMaxExperts = 4096;
/// Bound on R here: tables of that many peers fit a block's shared memory many times over.
inline constexpr int kMaxRanks = 128;
/// Maximum number of chunks in which a rank reports the progress of its tokens.
inline constexpr int kMaxChunks = 1024;
/// Bound on the blocks of a kernel that writes to peers or reads from them: more than any GPU has multiprocessors.
inline constexpr int kMaxCallBlocks = 256;

/// Bits of EntryMessage::flags.
inline constexpr std::int64_t kRowsStaged = 1;    ///< rows_offset is staging; dispatch: indexed by token row
inline constexpr std::int64_t kTablesDirect = 2;  ///< dispatch: scales, ids and weights go straight to the outputs
inline constexpr std::int64_t kWideIds = 4;       ///< dispatch: ids_offset holds i64
/// Combine, with kRowsStaged: the bits from this one on are the number of blocks that stage.
inline constexpr int kStagersShift = 8;

/// A rank's part in a call, as it sends it to every peer. Offsets are in its own arena. What the first two refer to:
///
///   call       rows_offset           tables_offset
///   dispatch   where its rows go     where its token records go, if it gets any
///   combine    where its rows are    where the weights of its rows are
///   route      not used              where its source table is, if its rows do not fit the one announced before
struct EntryMessage {
  std::uint64_t agreement = 0;     ///< hash of what all ranks must pass alike; 0: this rank refuses the call
  std::int64_t record_number = 0;  ///< of the call in the host's CallLog
  std::int64_t rows_offset = 0;
  std::int64_t rows_stride = 0;  ///< bytes
  std::int64_t tables_offset = 0;
  std::int64_t flags = 0;
  std::int64_t scales_offset = 0;  ///< this and the next three only with kTablesDirect
  std::int64_t scales_stride = 0;  ///< bytes between rows; a row is contiguous
  std::int64_t ids_offset = 0;
  std::int64_t weights_offset = 0;
  std::int64_t num_blocks = 0;  ///< of the kernel: words of block_done
};
/// Words of 4 bytes, one a lane of a warp.
inline constexpr int kEntryWords = sizeof(EntryMessage) / sizeof(std::uint32_t);
inline constexpr int kEntrySlotWords = 32;
static_assert(kEntryWords <= kEntrySlotWords);

/// What a rank sends with its counts.
struct alignas(16) CountsHeader {
  std::int64_t source_offset;  ///< in its arena: its source table, which may be written
  std::uint64_t epoch;         ///< not this one: the rank made another call
  std::uint64_t agreement;
  std::int64_t record_number;
  std::int64_t max_recv_rows;  ///< 0: not bounded
  std::int64_t num_tokens;     ///< T of that rank
  std::int64_t bad_entry;      ///< index in [T, K] of the first id that is no expert, -1: all are good
  std::int64_t bad_id;
  std::int64_t repeats;      ///< 1: some token names an expert twice
  std::int64_t source_rows;  ///< that its source table has room for
  std::uint64_t homes_hash;  ///< of a placement that only GPUs know, else 0
  std::int64_t unused;
};
/// Words of 4 bytes, as it is sent.
inline constexpr int kCountsHeaderWords = sizeof(CountsHeader) / sizeof(std::uint32_t);
static_assert(kCountsHeaderWords % 2 == 0, "posted two words at a time");

/// This rank's own words.
struct LocalState {
  std::uint64_t epoch;    ///< calls finished
  std::uint64_t outcome;  ///< of the current call: epoch << 2 | device::Outcome
  std::uint32_t broken;   ///< a wait timed out or was stopped: every kernel ends at once
  std::uint32_t num_chunks_sent;
  std::uint32_t num_blocks_done;  ///< whose part in the kernel is over
  std::uint32_t num_receivers_done;
  std::uint32_t num_items_claimed;           ///< of a combine's work; 0 between calls
  std::uint32_t chunk_arrivals[kMaxChunks];  ///< warps that have finished their part of a chunk
  // As WaitTimes, where kernels need not go over PCIe to add to it.
  std::uint64_t wait_ns[kMaxRanks];
  std::uint64_t step_wait_ns[kMaxRanks];
  std::uint64_t counted_until_ns[kMaxRanks];  ///< see wait_count.cuh
};

struct Control {
  std::uint64_t* entries = nullptr;       ///< [R][kEntrySlotWords] epoch << 32 | word of the EntryMessage
  std::uint64_t* progress = nullptr;      ///< [R]
  std::uint64_t* staged = nullptr;        ///< [R][kMaxCallBlocks]
  std::uint64_t* done = nullptr;          ///< [R]
  std::uint64_t* block_done = nullptr;    ///< [R][kMaxCallBlocks]
  std::uint64_t* counts_ready = nullptr;  ///< [R]
  std::uint64_t* headers = nullptr;       ///< [2][R][kCountsHeaderWords] epoch << 32 | word of the CountsHeader
  std::uint64_t* counts = nullptr;        ///< [2][R][counts_stride(R)] epoch << 32 | count; rows of plan::CountColumns
  LocalState* local = nullptr;
  std::size_t size_bytes = 0;

  /// Counts from one rank's row to the next.
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
