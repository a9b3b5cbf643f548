#ifndef FERRY_CUDA_INTRANODE_DISPATCH_TOKENS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_TOKENS_CUH

/// Sending token by token: each warp takes every n-th token, loads its row once, stores it to each destination (final
/// row or staging), and reports progress to receivers that copy or unpack rows as they arrive.

#include "cuda/intranode/dispatch_tables.cuh"

namespace ferry::cuda::device {

class Sender {
 public:
  __device__ Sender(const DispatchParams& params, const Receiver* receivers, int warp, int num_warps)
      : params_(params), receivers_(receivers), warp_(warp), num_warps_(num_warps) {}

  /// This warp's tokens: `num_tokens` of them, starting with `first_token`, `token_step` apart.
  __device__ int first_token() const { return warp_; }
  __device__ int token_step() const { return num_warps_; }
  __device__ int num_tokens() const {
    return params_.num_tokens > warp_ ? static_cast<int>((params_.num_tokens - 1 - warp_) / num_warps_) + 1 : 0;
  }
  __device__ const std::byte* row(std::int64_t token) const { return params_.x + token * params_.x_stride; }

  /// Address of the row at this lane's destination; null if the destination needs no copy of its own.
  __device__ std::byte* target(const Destination& destination) const {
    if (destination.rank < 0) return nullptr;
    const Receiver& receiver = receivers_[destination.rank];
    const bool wanted = (destination.flags & (receiver.staged ? kFirstOfRank : kFirstOfRow)) != 0;
    if (!wanted) return nullptr;
    const std::int64_t row = receiver.staged ? destination.token_row : destination.row;
    return receiver.rows + row * receiver.row_stride;
  }

  /// Calls `store(pointer)` in the whole warp for each target. Ranks after this one come first, so that ranks do not
  /// all write to the same peer at the same time.
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

/// Iterates over the pieces of a warp's tokens and over the stages that hold them.
class PieceWalk {
 public:
  __device__ PieceWalk(const Sender& sender, int num_pieces)
      : token_(sender.first_token()),
        step_(sender.token_step()),
        num_left_(sender.num_tokens()),
        num_pieces_(num_pieces) {}

  __device__ bool ended() const { return num_left_ == 0; }
  __device__ int token() const { return token_; }
  /// Number of tokens left, including this one.
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

/// Tables of a warp's tokens in order, loaded one token ahead of their use; destinations are loaded two tokens ahead.
class TableStream {
 public:
  __device__ TableStream(const TableSender& tables, const PieceWalk& first, int step) : tables_(tables), step_(step) {
    if (first.num_left() > 0) {
      next_ = tables.load(first.token(), tables.destination_of(tables.load_destination(first.token())));
    }
    if (first.num_left() > 1) destination_after_ = tables.load_destination(first.token() + step);
  }

  /// Tables of the token at `walk`. Called once for each token.
  __device__ TokenTables take(const PieceWalk& walk) {
    const TokenTables taken = next_;
    if (walk.num_left() > 1) next_ = tables_.load(walk.token() + step_, tables_.destination_of(destination_after_));
    if (walk.num_left() > 2) destination_after_ = tables_.load_destination(walk.token() + 2 * step_);
    if (walk.num_left() > kPrefetchTokens) tables_.prefetch(walk.token() + kPrefetchTokens * step_);
    return taken;
  }

 private:
  static constexpr int kPrefetchTokens = 4;

  const TableSender& tables_;
  int step_;
  TokenTables next_;
  uint4 destination_after_{};
};

/// Sends by the bulk copy engine. `chunk_of(token)`: chunk in which a token is reported.
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
    // Tokens before the last one are complete when at most the stores of this item and the last one are open. The
    // report precedes the stores of this token's tables, because it would otherwise wait for them.
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

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_TOKENS_CUH
