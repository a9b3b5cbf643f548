#include "c/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

namespace ferry::c {
namespace {

static_assert(FERRY_REPLICA_NEAREST == static_cast<int>(ReplicaChoice::kNearest));
static_assert(FERRY_REPLICA_ROUND_ROBIN == static_cast<int>(ReplicaChoice::kRoundRobin));

Status pick(const ferry_tensor* topk_idx, std::int64_t num_experts, const ferry_placement* given,
            const ReplicaPlace& place, const ferry_tensor* output) {
  Placement placement;
  if (Status status = read_placement("ferry_pick_replicas", given, placement); !status.ok()) return status;
  return pick_replicas(tensor_view(topk_idx), num_experts, placement, place, tensor_view(output));
}

/// Arrays of a caller that are to take a placement.
struct PlacementArrays {
  std::int64_t capacity = 0;
  std::int32_t* physical_to_logical = nullptr;
  std::int32_t* physical_to_rank = nullptr;
  std::int64_t* num_physical_experts = nullptr;
};

Status survive(const ferry_placement* given, std::int64_t num_experts, int num_ranks, const std::int32_t* kept_ranks,
               std::int64_t num_kept_ranks, const PlacementArrays& to) {
  constexpr const char* kCall = "ferry_surviving_placement";
  if (to.physical_to_logical == nullptr || to.physical_to_rank == nullptr || to.num_physical_experts == nullptr) {
    return invalid(kCall, "an array to fill, or the pointer to their length, is null");
  }
  // As many as there are ranks: an uninitialised number is not taken for a length.
  if (num_kept_ranks < 0 || num_kept_ranks > num_ranks || (kept_ranks == nullptr && num_kept_ranks > 0)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: num_kept_ranks is {} and kept_ranks is {}, expected a list of at most {} ranks",
                              kCall, num_kept_ranks, kept_ranks == nullptr ? "null" : "given", num_ranks));
  }
  Placement placement;
  if (Status status = read_placement(kCall, given, placement); !status.ok()) return status;
  const std::vector<int> kept(kept_ranks, kept_ranks + num_kept_ranks);
  const Result<Placement> left = surviving_placement(placement, num_experts, num_ranks, kept);
  if (!left.ok()) return left.status();
  if (left->num_physical_experts() > to.capacity) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: capacity is {}, expected room for {} physical experts",
                                                           kCall, to.capacity, left->num_physical_experts()));
  }
  std::ranges::copy(left->physical_to_logical, to.physical_to_logical);
  std::ranges::copy(left->physical_to_rank, to.physical_to_rank);
  *to.num_physical_experts = left->num_physical_experts();
  return {};
}

}  // namespace

Status read_placement(const char* call, const ferry_placement* given, Placement& placement) {
  ferry_placement read;
  if (Status status = read_struct(call, given, read); !status.ok()) return status;
  const std::int64_t num = read.num_physical_experts;
  const bool arrays = read.physical_to_logical != nullptr || read.physical_to_rank != nullptr;
  // Limit the length to the range of ids, so that an uninitialised number is not taken for a length.
  if (arrays != (num != 0) || num < 0 || num > std::numeric_limits<std::int32_t>::max()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: num_physical_experts of the ferry_placement is {}, expected the length of its "
                              "arrays, 0 if both are NULL",
                              call, num));
  }
  if (read.physical_to_logical != nullptr) {
    placement.physical_to_logical.assign(read.physical_to_logical, read.physical_to_logical + num);
  }
  if (read.physical_to_rank != nullptr) {
    placement.physical_to_rank.assign(read.physical_to_rank, read.physical_to_rank + num);
  }
  placement.choice = static_cast<ReplicaChoice>(read.choice);
  placement.allow_homeless = read.allow_homeless != 0;
  placement.physical_to_logical_view = tensor_view(read.physical_to_logical_view);
  return {};
}

Status read_counters(const char* call, const ferry_load_counters* given, LoadCounters& counters) {
  ferry_load_counters read;
  if (Status status = read_struct(call, given, read); !status.ok()) return status;
  counters = {tensor_view(read.logical), tensor_view(read.physical), tensor_view(read.received),
              tensor_view(read.homeless)};
  return {};
}

}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_check_placement(const ferry_placement* placement, int64_t num_experts, int32_t num_ranks) {
  return guarded([&] {
    ferry::Placement read;
    ferry::Status status = read_placement("ferry_check_placement", placement, read);
    return status.ok() ? ferry::check_placement(read, num_experts, num_ranks) : status;
  });
}

ferry_status* ferry_pick_replicas(const ferry_tensor* topk_idx, int64_t num_experts, const ferry_placement* placement,
                                  int32_t rank, int32_t num_ranks, int32_t ranks_per_node, const ferry_tensor* output) {
  return guarded([&] { return pick(topk_idx, num_experts, placement, {rank, num_ranks, ranks_per_node}, output); });
}

ferry_status* ferry_surviving_placement(const ferry_placement* placement, int64_t num_experts, int32_t num_ranks,
                                        const int32_t* kept_ranks, int64_t num_kept_ranks, int64_t capacity,
                                        int32_t* physical_to_logical, int32_t* physical_to_rank,
                                        int64_t* num_physical_experts) {
  return guarded([&] {
    return survive(placement, num_experts, num_ranks, kept_ranks, num_kept_ranks,
                   {capacity, physical_to_logical, physical_to_rank, num_physical_experts});
  });
}
