/// The dispatch kernel. Sending warps each take every n-th token: load a row once and store it to each receiver's final
/// row (or staging). Then the frame: which block does what, and how a call begins and ends.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/dispatch_receive.cuh"
#include "cuda/intranode/dispatch_tables.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// One receiver per rank, from the entry messages. All threads of the block; ends with a block barrier. True when some
/// receiver watches progress.
__device__ bool find_receivers(const DispatchParams& params, Receiver* receivers) {
  const RankParams& ranks = params.ranks;
  bool watched = false;
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kDispatchThreads) {
    const volatile EntryMessage& message = ranks.control.messages[rank];
    std::byte* base = ranks.peer_bases[rank];
    Receiver receiver{};
    receiver.rows = base + message.rows_offset;
    receiver.row_stride = message.rows_stride;
    receiver.records = base + message.tables_offset;
    receiver.staged = (message.flags & kRowsStaged) != 0;
    receiver.direct = (message.flags & kTablesDirect) != 0;
    receiver.wide_ids = (message.flags & kWideIds) != 0;
    receiver.scales = base + message.scales_offset;
    receiver.scales_stride = message.scales_stride;
    receiver.scales_column_stride = params.scales.element_bytes;
    receiver.ids = base + message.ids_offset;
    receiver.weights = reinterpret_cast<float*>(base + message.weights_offset);
    if (rank == ranks.rank) {  // this rank can reach its own memory, of whatever kind
      const ScaleTable& scales = params.out.scales;
      receiver = {params.out.x,
                  params.out.x_stride,
                  nullptr,
                  scales.data,
                  scales.row_stride * scales.element_bytes,
                  scales.column_stride * scales.element_bytes,
                  params.out.ids,
                  params.out.weights,
                  false,
                  true,
                  params.out.wide_ids,
                  false};
    }
    // Copying a staged row needs the rows that the token takes.
    receiver.gets_record = !receiver.direct || (receiver.staged && params.record.has_rows);
    watched = watched || receiver.staged || receiver.gets_record;
    receivers[rank] = receiver;
  }
  return __syncthreads_or(static_cast<int>(watched)) != 0;
}

class Sender {
 public:
  __device__ Sender(const DispatchParams& params, const Receiver* receivers, int warp, int num_warps)
      : params_(params), receivers_(receivers), warp_(warp), num_warps_(num_warps) {}

  /// This warp's tokens: `num_tokens` of them, from `first_token` on, `token_step` apart.
  __device__ int first_token() const { return warp_; }
  __device__ int token_step() const { return num_warps_; }
  __device__ int num_tokens() const {
    return params_.num_tokens > warp_ ? static_cast<int>((params_.num_tokens - 1 - warp_) / num_warps_) + 1 : 0;
  }
  __device__ const std::byte* row(std::int64_t token) const { return params_.x + token * params_.x_stride; }

  /// Address of the row at this lane's destination; null where it needs no copy of its own.
  __device__ std::byte* target(const Destination& destination) const {
    if (destination.rank < 0) return nullptr;
    const Receiver& receiver = receivers_[destination.rank];
    const bool wanted = (destination.flags & (receiver.staged ? kFirstOfRank : kFirstOfRow)) != 0;
    if (!wanted) return nullptr;
    const std::int64_t row = receiver.staged ? destination.token_row : destination.row;
    return receiver.rows + row * receiver.row_stride;
  }

  /// Calls `store(pointer)` in the whole warp for each target, beginning with the ranks after this one, so that ranks
  /// do not all write to the same peer at once.
  template <typename Store>
  __device__ void for_each_target(const Destination& destination, std::byte* target, Store store) const {
    const unsigned wanted = __ballot_sync(0xFFFFFFFFU, target != nullptr);
    const unsigned after = __ballot_sync(0xFFFFFFFFU, target != nullptr && destination.rank > params_.ranks.rank);
    for (int half = 0; half < 2; ++half) {
      for (unsigned left = half == 0 ? after : wanted & ~after; left != 0; left &= left - 1) {
        const auto address = reinterpret_cast<unsigned long long>(target);
        store(reinterpret_cast<std::byte*>(__shfl_sync(0xFFFFFFFFU, address, __ffs(static_cast<int>(left)) - 1)));
      }
    }
  }

 private:
  const DispatchParams& params_;
  const Receiver* receivers_;
  int warp_;
  int num_warps_;
};

/// A walk over the pieces of a warp's tokens, and over the stages that they go through.
class PieceWalk {
 public:
  __device__ PieceWalk(const Sender& sender, int num_pieces)
      : token_(sender.first_token()),
        step_(sender.token_step()),
        num_left_(sender.num_tokens()),
        num_pieces_(num_pieces) {}

  __device__ bool ended() const { return num_left_ == 0; }
  __device__ int token() const { return token_; }
  /// Tokens from this one on.
  __device__ int num_left() const { return num_left_; }
  __device__ int piece() const { return piece_; }
  __device__ int stage() const { return stage_; }
  __device__ void advance() {
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    if (++piece_ < num_pieces_) return;
    piece_ = 0;
    if (--num_left_ > 0) token_ += step_;
  }

 private:
  int token_;
  int step_;
  int num_left_;
  int num_pieces_;
  int piece_ = 0;
  int stage_ = 0;
};

/// The tables of a warp's tokens in order, loaded one token ahead of their use, destinations two ahead.
class TableStream {
 public:
  __device__ TableStream(const TableSender& tables, const PieceWalk& first, int step) : tables_(tables), step_(step) {
    if (first.num_left() > 0) next_ = tables.load(first.token(), tables.load_destination(first.token()));
    if (first.num_left() > 1) destination_after_ = tables.load_destination(first.token() + step);
  }

  /// Tables of the token at `walk`; call once for each.
  __device__ TokenTables take(const PieceWalk& walk) {
    const TokenTables taken = next_;
    if (walk.num_left() > 1) next_ = tables_.load(walk.token() + step_, destination_after_);
    if (walk.num_left() > 2) destination_after_ = tables_.load_destination(walk.token() + 2 * step_);
    if (walk.num_left() > kPrefetchTokens) tables_.prefetch(walk.token() + kPrefetchTokens * step_);
    return taken;
  }

 private:
  static constexpr int kPrefetchTokens = 4;

  const TableSender& tables_;
  int step_;
  TokenTables next_;
  Destination destination_after_{};
};

/// Sends by the bulk copy engine. `chunk_of(token)`: the chunk that a token is reported with.
template <typename Reporter, typename ChunkOf>
__device__ void send_bulk(const DispatchParams& params, const Sender& sender, const TableSender& table_sender,
                          WarpStages& stages, Reporter& reporter, ChunkOf chunk_of) {
  const int pieces = num_pieces(params.row_bytes);
  PieceWalk loading(sender, pieces);
  const auto load_next = [&] {
    if (loading.ended()) return;
    if (lane_idx() == 0) {
      const std::uint32_t bytes = piece_bytes(params.row_bytes, loading.piece());
      std::uint64_t* barrier = stages.barriers + loading.stage();
      expect_loads(barrier, bytes);
      start_load(stages.stage(loading.stage()),
                 sender.row(loading.token()) + static_cast<std::int64_t>(loading.piece()) * kPieceBytes, bytes,
                 barrier);
    }
    loading.advance();
  };
  for (int ahead = 0; ahead < kStages - 1; ++ahead) load_next();
  PieceWalk sending(sender, pieces);
  TableStream stream(table_sender, sending, sender.token_step());
  TokenTables tables;
  std::byte* target = nullptr;
  int token_before = 0;
  for (; !sending.ended(); sending.advance()) {
    const int piece = sending.piece();
    if (piece == 0) {
      tables = stream.take(sending);
      target = sender.target(tables.destination);
    }
    stages.wait_loaded(sending.stage());
    const std::uint32_t bytes = piece_bytes(params.row_bytes, piece);
    sender.for_each_target(tables.destination, target, [&](std::byte* row) {
      if (lane_idx() == 0)
        start_store(row + static_cast<std::int64_t>(piece) * kPieceBytes, stages.stage(sending.stage()), bytes);
    });
    if (lane_idx() == 0) {
      close_store_group();
      wait_store_reads<1>();
    }
    __syncwarp();
    load_next();
    if (piece != 0) continue;
    // Tokens before the last one are complete when at most this item's store and the last one's are open. Reported
    // before this token's tables are written, whose stores the report would wait for.
    const int chunk = chunk_of(token_before);
    if (chunk > reporter.next()) {
      if (lane_idx() == 0) wait_store_groups<2>();
      __syncwarp();
      reporter.report_before(chunk);
    }
    table_sender.send(sending.token(), tables);
    token_before = sending.token();
  }
  if (lane_idx() == 0) wait_store_groups<0>();
  __syncwarp();
}

/// Sends by 16-byte loads and stores.
template <typename Reporter, typename ChunkOf>
__device__ void send_by_threads(const DispatchParams& params, const Sender& sender, const TableSender& table_sender,
                                Reporter& reporter, ChunkOf chunk_of) {
  PieceWalk sending(sender, 1);
  TableStream stream(table_sender, sending, sender.token_step());
  for (; !sending.ended(); sending.advance()) {
    const std::int64_t token = sending.token();
    reporter.report_before(chunk_of(token));
    const TokenTables tables = stream.take(sending);
    table_sender.send(token, tables);
    sender.for_each_target(tables.destination, sender.target(tables.destination),
                           [&](std::byte* row) { copy_by_warp(row, sender.row(token), params.row_bytes); });
  }
}

/// A block's shared memory, sizes and pointers from one place. Stages come first, where they are aligned to
/// kLandingBytes.
struct Shared {
  std::byte* stages;    ///< with the copy engine only: stages and their barriers
  Receiver* receivers;  ///< [R]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    plan::Carver carver(base);
    Shared shared{};
    shared.stages = carver.take<std::byte>(bulk ? kStagesBytes + kBarriersBytes : 0);
    shared.receivers = carver.take<Receiver>(static_cast<std::size_t>(num_ranks));
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

std::size_t shared_bytes(int num_ranks, bool bulk) { return Shared::at(nullptr, num_ranks, bulk).size_bytes; }

/// Passes the outcome to the receiving blocks. They must not read the messages themselves: a peer may write its next
/// message as soon as the sending blocks are done with this one.
__device__ void post_outcome(const RankParams& ranks, std::uint64_t epoch, Outcome outcome) {
  store_release_system(&ranks.control.local->outcome, epoch << 2 | static_cast<std::uint64_t>(outcome));
}

__device__ Outcome await_outcome(const RankParams& ranks, std::uint64_t epoch) {
  __shared__ Outcome outcome;
  if (threadIdx.x == 0) {
    const std::uint64_t* word = &ranks.control.local->outcome;
    const bool here = wait_flag(ranks, {Awaited::kOwn, ranks.rank, epoch}, word, epoch << 2);
    outcome = here ? static_cast<Outcome>(load_acquire_system(word) & 3U) : Outcome::kStop;
  }
  __syncthreads();
  return outcome;
}

template <bool kBulk>
__device__ void send(const DispatchParams& params, const Shared& shared, std::uint64_t epoch, Outcome outcome) {
  const int warp = static_cast<int>(blockIdx.x) * kDispatchWarps + warp_idx();
  const int num_warps = params.num_send_blocks * kDispatchWarps;
  const bool go = outcome == Outcome::kGo;
  const bool watched = go && find_receivers(params, shared.receivers);
  // No receiver watches progress: one chunk, reported at the end.
  const ChunkBorders chunks = watched ? params.chunks : ChunkBorders{params.num_blocks, params.num_blocks};
  const int num_chunks = watched ? chunks.num_chunks() : 1;
  const auto rows_after = [&params, go, watched, chunks](int chunk, int rank) -> std::int64_t {
    if (!go) return 0;
    const int blocks = watched ? chunks.end_block(chunk) : params.num_blocks;
    return params.block_ranks[blocks * params.ranks.num_ranks + rank];
  };
  const auto chunk_of = [&params, watched, chunks](std::int64_t token) {
    return watched ? chunks.chunk_of(static_cast<int>(token) / params.tokens_per_block) : 0;
  };
  ChunkReporter reporter(params.ranks, {num_warps, num_chunks}, epoch, rows_after, true);
  if (go) {
    const Sender sender(params, shared.receivers, warp, num_warps);
    const TableSender table_sender(params, shared.receivers);
    if constexpr (kBulk) {
      WarpStages stages = make_stages(shared.stages);
      send_bulk(params, sender, table_sender, stages, reporter, chunk_of);
    } else {
      send_by_threads(params, sender, table_sender, reporter, chunk_of);
    }
  }
  reporter.report_before(num_chunks);
}

template <bool kBulk>
__device__ void receive(const DispatchParams& params, const Shared& shared, std::uint64_t epoch) {
  if (await_outcome(params.ranks, epoch) == Outcome::kGo) {
    const int block = static_cast<int>(blockIdx.x) - params.num_send_blocks;
    const int num_warps = params.num_receive_blocks * kDispatchWarps;
    Arrivals arrivals(params, epoch, block * kDispatchWarps + warp_idx(), num_warps);
    if constexpr (kBulk) {
      WarpStages stages = make_stages(shared.stages);
      BulkReceiver(params, stages, arrivals).run();
    } else {
      receive_by_threads(params, arrivals);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&params.ranks.control.local->num_receivers_done, 1);
  }
}

/// One warp of the first block, after its own sending.
__device__ void end_call(const DispatchParams& params, std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  LocalState& local = *ranks.control.local;
  const bool own = wait_until(
      ranks, {Awaited::kOwn, ranks.rank, epoch},
      [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_receivers_done)); },
      static_cast<std::uint64_t>(params.num_receive_blocks));
  if (__all_sync(0xFFFFFFFFU, own) == 0) return;
  if (lane_idx() == 0) local.num_receivers_done = 0;
  finish_call(ranks, epoch);
}

template <bool kBulk>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(kLandingBytes) std::byte memory[];
  const RankParams& ranks = params.ranks;
  if (is_broken(ranks)) return;
  const bool first = blockIdx.x == 0;
  if (params.summary != nullptr && params.summary->valid == 0) {
    if (first && threadIdx.x == 0) report_refused_route(ranks, *params.summary);
    return;
  }
  const std::uint64_t epoch = current_epoch(ranks);
  const Shared shared = Shared::at(memory, ranks.num_ranks, kBulk);
  if (static_cast<int>(blockIdx.x) >= params.num_send_blocks) {
    receive<kBulk>(params, shared, epoch);
    return;
  }
  if (first && warp_idx() == 0) post_entry(ranks, params.entry, epoch);
  const Outcome outcome = await_entries(ranks, params.entry, epoch);
  if (first && threadIdx.x == 0) {
    post_outcome(ranks, epoch, outcome);
    if (outcome == Outcome::kSkip && params.entry.agreement != 0) report_disagreement(ranks, epoch);
  }
  if (outcome == Outcome::kStop) return;
  send<kBulk>(params, shared, epoch, outcome);
  if (first && warp_idx() == 0) end_call(params, epoch);
}

}  // namespace

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream) {
  const int num_blocks = params.num_send_blocks + params.num_receive_blocks;
  const LaunchShape shape{static_cast<unsigned>(num_blocks), kDispatchThreads,
                          shared_bytes(params.ranks.num_ranks, params.bulk)};
  return launch_kernel(params.bulk ? dispatch_kernel<true> : dispatch_kernel<false>, shape, params, stream);
}

cudaError_t load_padding_kernel();

cudaError_t load_dispatch_kernels(std::size_t shared_limit, bool& has_bulk) {
  if (const cudaError_t error = load_padding_kernel(); error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, dispatch_kernel<true>);
  if (error != cudaSuccess) return error;
  constexpr int kFirstWithBulk = 90;  // PTX ISA, cp.async.bulk: sm_90
  has_bulk = attributes.ptxVersion >= kFirstWithBulk && attributes.binaryVersion >= kFirstWithBulk &&
             shared_bytes(kMaxRanks, true) <= shared_limit;
  error = cudaFuncSetAttribute(dispatch_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes(kMaxRanks, false)));
  if (error != cudaSuccess || !has_bulk) return error;
  return cudaFuncSetAttribute(dispatch_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes(kMaxRanks, true)));
}

}  // namespace ferry::cuda
