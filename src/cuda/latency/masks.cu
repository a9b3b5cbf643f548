/// Kernels of groups that mask lost ranks (mask.hpp): the gates, which wait for ranks and mask those that do not come,
/// and the update and query of masks.

#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/mask.cuh"
#include "cuda/placement/pick.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kGateThreads = 512;

__global__ void __launch_bounds__(kMaxRanks) grants_gate_kernel(const __grid_constant__ MaskGateParams params) {
  wait_for_grants(params.call, params.mask, params.kind, turn_number(params.call, params.kind));
}

/// One block's work for one rank.
class Arrivals {
 public:
  __device__ Arrivals(const MaskGateParams& params, std::uint64_t number, int set, int source)
      : params_(params), call_(params.call), number_(number), set_(set), source_(source) {}

  __device__ bool is_source_masked() const {
    bool masked = false;
    if (threadIdx.x == 0) masked = mask_if_masked_by(call_, params_.mask, source_);
    return __syncthreads_or(static_cast<int>(masked)) != 0;
  }

  /// Waits for the rank's header; false once the rank is masked, or the group broke. All threads, as in the functions
  /// below.
  __device__ bool wait_header(LatencyHeader& header) const {
    const auto thread = static_cast<int>(threadIdx.x);
    bool came = true;
    if (thread < kLatencyHeaderWords) {
      const Payload word = look(Awaited::kEntry, header_at_home() + thread);
      reinterpret_cast<std::uint32_t*>(&header)[thread] = word.value;
      came = word.came;
    }
    return __syncthreads_and(static_cast<int>(came)) != 0;
  }

  /// Waits for everything else that the rank sends, and copies its words, except those of rows, to the shadow.
  __device__ bool wait_rest(const LatencyHeader& header) const {
    bool came = true;
    if (set_ != kNoSet && params_.kind == LatencyKind::kCombine) {
      came = copy_words(Awaited::kDone, done_words(call_, call_.ranks.rank, set_, source_),
                        static_cast<int>(header.blocks_or_homes));
    } else if (set_ != kNoSet && agrees(header)) {
      came = copy_words(Awaited::kCounts, count_words(call_, call_.ranks.rank, set_, source_), call_.num_experts) &&
             wait_rows(header.num_tokens);
    }
    return __syncthreads_and(static_cast<int>(came)) != 0;
  }

  /// Waits for the weights of the rank's tokens that have rows here.
  __device__ bool wait_weights(const LatencyHeader& header) const {
    bool came = true;
    if (agrees(header)) {
      const std::uint64_t* const words =
          CombineSlot::at(own_window(call_).slot(call_.layout, LatencyKind::kCombine, set_, source_)).weights;
      const std::int64_t first = source_ * call_.max_tokens * call_.num_topk;
      const std::int64_t num_entries = std::int64_t{call_.tables.tokens_of_rank[source_]} * call_.num_topk;
#pragma unroll 1
      for (std::int64_t i = threadIdx.x; i < num_entries && came; i += kGateThreads) {
        if (call_.tables.items[first + i] >= 0) came = look(Awaited::kEntry, words + i).came;
      }
    }
    return __syncthreads_and(static_cast<int>(came)) != 0;
  }

  __device__ void post_shadow_header(const LatencyHeader& header) const {
    if (threadIdx.x >= kLatencyHeaderWords) return;
    post_word(in_shadow(header_at_home()) + threadIdx.x, number_,
              reinterpret_cast<const std::uint32_t*>(&header)[threadIdx.x]);
  }

  /// Writes to the shadow the words of a masked rank for the receive half: it has no tokens.
  __device__ void stand_in() const {
    LatencyHeader header;
    header.agreement = call_.agreement;
    header.record_number = kMaskedRecord;
    header.blocks_or_homes = hash_of_homes(params_.placement);
    post_shadow_header(header);
    if (params_.refuses) return;
    if (params_.kind == LatencyKind::kDispatch) {
      std::uint64_t* const counts = in_shadow(count_words(call_, call_.ranks.rank, set_, source_));
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < call_.num_experts; i += kGateThreads) {
        post_word(counts + i, number_, 0);
      }
    }
    lose_homes();
  }

  /// Writes to the shadow that a masked rank has no set, for a send half that follows.
  __device__ void take_set() const {
    if (threadIdx.x != 0) return;
    post_word(shadow_grant(call_, params_.mask, params_.kind, source_, number_), number_, kNoSet);
  }

 private:
  __device__ bool agrees(const LatencyHeader& header) const {
    return header.agreement == call_.agreement && call_.agreement != 0;
  }
  __device__ std::uint64_t* header_at_home() const {
    return header_words(call_, call_.ranks.rank, params_.kind, set_, source_);
  }
  __device__ std::uint64_t* in_shadow(std::uint64_t* word) const {
    return word + shadow_distance(call_, params_.mask) / LatencyLayout::kWordBytes;
  }
  __device__ Payload look(Awaited awaited, const std::uint64_t* word) const {
    return look_or_mask(call_, params_.mask, {awaited, source_, number_}, word);
  }

  /// Waits for words, and copies them to the shadow.
  __device__ bool copy_words(Awaited awaited, std::uint64_t* words, int num_words) const {
    bool came = true;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < num_words && came; i += kGateThreads) {
      const Payload word = look(awaited, words + i);
      came = word.came;
      if (came) post_word(in_shadow(words + i), number_, word.value);
    }
    return came;
  }

  __device__ bool wait_rows(std::int64_t num_tokens) const {
    const DispatchSlot slot = DispatchSlot::at(
        own_window(call_).slot(call_.layout, LatencyKind::kDispatch, set_, source_), call_.max_tokens, call_.num_topk);
    const std::int64_t num_entries = num_tokens * call_.num_topk;
    bool came = true;
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < num_entries && came; i += kGateThreads) {
      const Payload entry = look(Awaited::kRow, slot.entries + i);
      came = entry.came;
      if (!came || entry.value == kNoExpert) continue;
      if (params_.placement.owner[entry_expert(entry.value)] != call_.ranks.rank) continue;
      came = look(Awaited::kRow, slot.row_flags + i / call_.num_topk).came;
      if (came && call_.tables.item_weights != nullptr) came = look(Awaited::kRow, slot.weights + i).came;
    }
    return came;
  }

  /// Marks entries of the rank's experts as lost: no row of theirs comes back.
  __device__ void lose_homes() const {
    const std::int64_t num_entries = call_.num_tokens * call_.num_topk;
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < num_entries; i += kGateThreads) {
      const std::int32_t home = call_.tables.homes[i];
      if (home >= 0 && home_rank(home) == source_) call_.tables.homes[i] = lost_home(home);
    }
  }

  const MaskGateParams& params_;
  const LatencyParams& call_;
  std::uint64_t number_;
  int set_;
  int source_;
};

__device__ LatencyHeader& shared_header() { return *reinterpret_cast<LatencyHeader*>(dynamic_shared()); }

__global__ void __launch_bounds__(kGateThreads) arrivals_gate_kernel(const __grid_constant__ MaskGateParams params) {
  const LatencyParams& call = params.call;
  const bool is_dispatch = params.kind == LatencyKind::kDispatch;
  const volatile SentCall& sent = params.refuses ? params.mask.state->refused[static_cast<int>(params.kind)]
                                  : is_dispatch  ? *call.tables.dispatch
                                                 : *call.tables.combine;
  // Nothing has been sent, so there is nothing to wait for.
  const bool none = sent.pending == 0 || is_broken(call.ranks);
  if (__syncthreads_or(static_cast<int>(none)) != 0) return;
  const Arrivals arrivals(params, sent.number, static_cast<int>(sent.set), static_cast<int>(blockIdx.x));
  LatencyHeader& header = shared_header();
  if (!arrivals.is_source_masked() && arrivals.wait_header(header) && arrivals.wait_rest(header)) {
    arrivals.post_shadow_header(header);
  } else if (arrivals.is_source_masked()) {
    arrivals.stand_in();
  }
}

__global__ void __launch_bounds__(kGateThreads) weights_gate_kernel(const __grid_constant__ MaskGateParams params) {
  const LatencyParams& call = params.call;
  const bool none = call.tables.summary->valid == 0 || is_broken(call.ranks);
  if (__syncthreads_or(static_cast<int>(none)) != 0) return;
  const std::uint64_t number = turn_number(call, params.kind);
  const std::uint64_t grant =
      load_relaxed_system(shadow_grant(call, params.mask, params.kind, call.ranks.rank, number));
  const Arrivals arrivals(params, number, static_cast<int>(payload_of(grant)), static_cast<int>(blockIdx.x));
  LatencyHeader& header = shared_header();
  if (!arrivals.is_source_masked() && arrivals.wait_header(header) && arrivals.wait_weights(header)) return;
  if (arrivals.is_source_masked()) arrivals.take_set();
}

__global__ void __launch_bounds__(kMaxRanks) mask_update_kernel(const __grid_constant__ MaskUpdateParams params) {
  const int rank = params.first_rank + static_cast<int>(threadIdx.x);
  if (rank >= params.end_rank || rank == params.call.ranks.rank) return;
  if (params.masked) {
    mask_rank(params.call, params.mask, rank);
  } else {
    unmask_rank(params.call, params.mask, rank);
  }
}

__global__ void __launch_bounds__(kMaxRanks) mask_query_kernel(const __grid_constant__ MaskQueryParams params) {
  const auto rank = static_cast<int>(threadIdx.x);
  if (rank < params.num_ranks) params.out[rank] = is_masked(params.mask, rank) ? 1 : 0;
}

std::size_t gate_bytes(const MaskGateParams& /*params*/) { return sizeof(LatencyHeader); }

constexpr KernelRow<MaskGateParams> kGrantsGate = {{grants_gate_kernel}, kMaxRanks, nullptr};
constexpr KernelRow<MaskGateParams> kArrivalsGate = {{arrivals_gate_kernel}, kGateThreads, gate_bytes};
constexpr KernelRow<MaskGateParams> kWeightsGate = {{weights_gate_kernel}, kGateThreads, gate_bytes};
constexpr KernelRow<MaskUpdateParams> kUpdate = {{mask_update_kernel}, kMaxRanks, nullptr};
constexpr KernelRow<MaskQueryParams> kQuery = {{mask_query_kernel}, kMaxRanks, nullptr};

}  // namespace

cudaError_t launch_grants_gate(const MaskGateParams& params, cudaStream_t stream) {
  return kGrantsGate.launch(0, 1, false, params, stream);
}

cudaError_t launch_arrivals_gate(const MaskGateParams& params, cudaStream_t stream) {
  return kArrivalsGate.launch(0, params.call.ranks.num_ranks, false, params, stream);
}

cudaError_t launch_weights_gate(const MaskGateParams& params, cudaStream_t stream) {
  return kWeightsGate.launch(0, params.call.ranks.num_ranks, false, params, stream);
}

cudaError_t launch_mask_update(const MaskUpdateParams& params, cudaStream_t stream) {
  return kUpdate.launch(0, 1, false, params, stream);
}

cudaError_t launch_mask_query(const MaskQueryParams& params, cudaStream_t stream) {
  return kQuery.launch(0, 1, false, params, stream);
}

cudaError_t load_masks() { return load_rows(kGrantsGate, kArrivalsGate, kWeightsGate, kUpdate, kQuery); }

}  // namespace ferry::cuda
