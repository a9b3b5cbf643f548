/// C interface of the placement of experts on ranks, and of moves between placements.

#include "ferry/balance.hpp"

#include <memory>
#include <vector>

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

// NOLINTBEGIN(readability-identifier-naming): the names of the C interface

struct ferry_balance {
  ferry::Balance value;
};

struct ferry_move_plan {
  ferry::MovePlan value;
  std::vector<ferry_expert_copy> copies;
};

// NOLINTEND(readability-identifier-naming)

namespace ferry::c {
namespace {

static_assert(FERRY_BALANCE_AUTO == static_cast<int>(BalancePolicy::kAuto));
static_assert(FERRY_BALANCE_HIERARCHICAL == static_cast<int>(BalancePolicy::kHierarchical));
static_assert(FERRY_BALANCE_GLOBAL == static_cast<int>(BalancePolicy::kGlobal));

/// For members with a default other than zero, where 0 means the default and -1 means zero.
template <typename Number>
Number number_or(Number number, Number otherwise) {
  return number == -1 ? 0 : nonzero_or(number, otherwise);
}

Status create_balance(const ferry_tensor* load, const ferry_balance_options* given, ferry_balance** handle) {
  constexpr const char* kCall = "ferry_balance_create";
  if (handle == nullptr) return invalid(kCall, "the pointer to the balance is null");
  ferry_balance_options read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  BalanceOptions options;
  options.num_replicas = read.num_replicas;
  options.num_groups = nonzero_or(read.num_groups, options.num_groups);
  options.num_nodes = nonzero_or(read.num_nodes, options.num_nodes);
  options.num_ranks = nonzero_or(read.num_ranks, options.num_ranks);
  options.policy = static_cast<BalancePolicy>(read.policy);
  options.previous = tensor_view(read.previous);
  options.max_moves = number_or(read.max_moves, options.max_moves);
  options.move_weight = read.move_weight;
  options.max_steps = number_or(read.max_steps, options.max_steps);
  if (read.interrupted != nullptr) {
    options.interrupted = [ask = read.interrupted, user = read.interrupted_user] { return ask(user) != 0; };
  }
  auto made = std::make_unique<ferry_balance>();
  Result<Balance> balanced = balance(tensor_view(load), options);
  if (!balanced.ok()) return balanced.status();
  made->value = std::move(*balanced);
  *handle = made.release();
  return {};
}

Status fill_sizes(const ferry_balance* handle, ferry_balance_sizes* wanted) {
  constexpr const char* kCall = "ferry_balance_get_sizes";
  if (handle == nullptr) return invalid(kCall, "the balance is null");
  ferry_balance_sizes known{};
  known.num_layers = handle->value.num_layers;
  known.num_experts = handle->value.num_experts;
  known.num_replicas = handle->value.num_replicas;
  known.max_replicas = handle->value.max_replicas;
  known.num_ranks = handle->value.num_ranks;
  known.policy = static_cast<std::int32_t>(handle->value.policy);
  return write_struct(kCall, known, wanted);
}

ferry_expert_copy to_copy(const ExpertCopy& copy) {
  return {copy.layer,
          copy.expert,
          copy.from,
          copy.to,
          copy.from_rank,
          copy.to_rank,
          copy.from_staging ? 1 : 0,
          copy.to_staging ? 1 : 0};
}

Status create_plan(const ferry_tensor* previous, const ferry_tensor* next, const ferry_move_plan_options* given,
                   ferry_move_plan** handle) {
  constexpr const char* kCall = "ferry_move_plan_create";
  if (handle == nullptr) return invalid(kCall, "the pointer to the plan is null");
  ferry_move_plan_options read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  MovePlanOptions options;
  options.num_experts = read.num_experts;
  options.num_ranks = nonzero_or(read.num_ranks, options.num_ranks);
  options.num_nodes = nonzero_or(read.num_nodes, options.num_nodes);
  Result<MovePlan> plan = plan_moves(tensor_view(previous), tensor_view(next), options);
  if (!plan.ok()) return plan.status();
  auto made = std::make_unique<ferry_move_plan>();
  made->value = std::move(*plan);
  for (const ExpertCopy& copy : made->value.copies) made->copies.push_back(to_copy(copy));
  *handle = made.release();
  return {};
}

/// Elements of a handle's array and their number; null and 0 for a null handle.
template <typename Element>
const Element* elements_of(const std::vector<Element>* elements, std::int64_t* num) {
  if (num != nullptr) *num = elements == nullptr ? 0 : static_cast<std::int64_t>(elements->size());
  return elements == nullptr ? nullptr : elements->data();
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_balance_create(const ferry_tensor* load, const ferry_balance_options* options,
                                   ferry_balance** balance) {
  return guarded([&] { return create_balance(load, options, balance); });
}

void ferry_balance_free(ferry_balance* balance) { delete balance; }

ferry_status* ferry_balance_get_sizes(const ferry_balance* balance, ferry_balance_sizes* sizes) {
  return guarded([&] { return fill_sizes(balance, sizes); });
}

const int32_t* ferry_balance_physical_to_logical(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.physical_to_logical, num);
}
const int32_t* ferry_balance_replica_counts(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.replica_counts, num);
}
const int32_t* ferry_balance_logical_to_physical(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.logical_to_physical, num);
}
const double* ferry_balance_max_load(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.max_load, num);
}
const double* ferry_balance_mean_load(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.mean_load, num);
}
const int64_t* ferry_balance_num_moves(const ferry_balance* balance, int64_t* num) {
  return elements_of(balance == nullptr ? nullptr : &balance->value.num_moves, num);
}

ferry_status* ferry_move_plan_create(const ferry_tensor* previous, const ferry_tensor* next,
                                     const ferry_move_plan_options* options, ferry_move_plan** plan) {
  return guarded([&] { return create_plan(previous, next, options, plan); });
}

void ferry_move_plan_free(ferry_move_plan* plan) { delete plan; }

const ferry_expert_copy* ferry_move_plan_copies(const ferry_move_plan* plan, int64_t* num) {
  return elements_of(plan == nullptr ? nullptr : &plan->copies, num);
}
const int64_t* ferry_move_plan_wave_begin(const ferry_move_plan* plan, int64_t* num) {
  return elements_of(plan == nullptr ? nullptr : &plan->value.wave_begin, num);
}
const int32_t* ferry_move_plan_num_staging(const ferry_move_plan* plan, int64_t* num) {
  return elements_of(plan == nullptr ? nullptr : &plan->value.num_staging, num);
}
