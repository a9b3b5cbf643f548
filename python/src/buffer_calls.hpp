#ifndef FERRY_PYTHON_BUFFER_CALLS_HPP
#define FERRY_PYTHON_BUFFER_CALLS_HPP

/// Calls of deep_ep's buffers, made as a whole: arguments are read, outputs allocated, ferry's calls made, and results
/// put together as the package returns them. They take the common, valid case; None means that nothing was done, and
/// the package then makes the call step by step, which also says what is wrong with wrong arguments.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "calls.hpp"
#include "deep_ep_arguments.hpp"
#include "expansion.hpp"

namespace ferry::python {

/// Requested form of what a dispatch of the second generation returns.
struct ElasticForm {
  bool zero_padding = false;
  bool column_major_scales = false;
  // Of a new one.
  bool copy_ids = true;  ///< the handle keeps a copy of the ids
  bool exact = true;     ///< as many rows as arrive
  bool expand = false;   ///< by expert, else by token
};

/// The same in latency mode.
struct FormOfSlab {
  bool use_fp8 = true;
  bool round_scale = false;
  bool use_ue8m0 = false;
};

/// Outputs of a new dispatch that are made before the number of rows is known, where route waits for it: for as many
/// rows as come if all ranks have as many tokens, each of which goes to as many ranks as it can.
class EarlyOutputs {
 public:
  /// `call` is used until the outputs are made, and has no outputs of its own.
  EarlyOutputs(const Calls& calls, const ReadDispatch& call, int num_topk)
      : calls_(calls), call_(call), num_topk_(num_topk) {}

  /// Makes none where memory for them is not at hand.
  /// @throws nanobind::python_error
  void make();
  /// Null if there are none for so many rows, or much of them would stay unused.
  MadeOutputs* get(std::int64_t num_rows);

 private:
  const Calls& calls_;
  const ReadDispatch& call_;
  int num_topk_;
  std::optional<MadeOutputs> outputs_;
};

/// What clients are told that each local expert has received: its rows, rounded up to a multiple of `alignment`.
nanobind::list aligned_counts(const Routing& routing, std::int64_t alignment);

/// Of one buffer. Methods return the tuple that the package's method of the same name returns; its event is of a call
/// that is not asynchronous.
class BufferCalls {
 public:
  /// group: the ferry.Group of `calls`. types: classes of the two packages, in the order of the members below.
  /// captured: a list, to which Routings are added that a graph has captured.
  BufferCalls(nanobind::object calls, nanobind::object group, const nanobind::tuple& types, nanobind::object captured);

  nanobind::object layout(nanobind::handle topk_idx, nanobind::handle num_experts, int ranks_per_node) const;

  /// KernelOptions::num_sms that an argument of calls stands for: the client's choice, 0 if there was none. None if it
  /// cannot be one.
  nanobind::object bound_of(nanobind::handle num_sms) const;

  /// num_sms: as of Config. The ferry.Routing alone if choices must be counted on all ranks first: then nothing but the
  /// route was made.
  nanobind::object dispatch(nanobind::handle x, nanobind::handle tokens_per_rank, nanobind::handle token_in_rank,
                            nanobind::handle tokens_per_expert, nanobind::handle topk_idx,
                            nanobind::handle topk_weights, nanobind::handle alignment, nanobind::handle most_rows,
                            nanobind::handle num_sms) const;
  nanobind::object dispatch_again(nanobind::handle x, nanobind::handle handle, nanobind::handle num_sms) const;
  nanobind::object combine(nanobind::handle x, nanobind::handle handle, nanobind::handle topk_weights,
                           nanobind::handle bias, nanobind::handle num_sms) const;

  /// num_max_tokens: M; most_tokens: its bound, 0: none. num_sms: also what the handle keeps.
  nanobind::object elastic_dispatch(nanobind::handle x, nanobind::handle topk_idx, nanobind::handle topk_weights,
                                    nanobind::handle expert_stats, nanobind::handle num_experts,
                                    nanobind::handle num_max_tokens, nanobind::handle most_tokens,
                                    nanobind::handle alignment, const ElasticForm& form,
                                    nanobind::handle num_sms) const;
  nanobind::object elastic_dispatch_again(nanobind::handle x, nanobind::handle handle, nanobind::handle topk_weights,
                                          const ElasticForm& form, nanobind::handle num_sms) const;
  nanobind::object elastic_combine(nanobind::handle x, nanobind::handle handle, nanobind::handle topk_weights,
                                   nanobind::handle bias, nanobind::handle num_sms) const;

  /// sent: a ferry._latency.Sent, or None if the call is not split; then there is no hook.
  nanobind::object low_latency_dispatch(nanobind::handle x, nanobind::handle topk_idx, nanobind::handle max_tokens,
                                        nanobind::handle num_experts, nanobind::handle expert_stats,
                                        nanobind::handle wait_stats, nanobind::handle sent,
                                        const FormOfSlab& form) const;
  nanobind::object low_latency_combine(nanobind::handle x, nanobind::handle topk_idx, nanobind::handle topk_weights,
                                       nanobind::handle handle, nanobind::handle out, nanobind::handle wait_stats,
                                       nanobind::handle sent) const;

 private:
  /// What a handle's tensors say, and the routing that belongs to them.
  struct FoundHandle {
    nanobind::object link;  ///< keeps the routing
    const PlacedRouting* routing = nullptr;
    bool knows_topk = false;
    std::int64_t num_rows = 0;    ///< N
    std::int64_t num_tokens = 0;  ///< T
  };
  struct FoundElastic {
    nanobind::object routing;  ///< keeps `placed`
    const PlacedRouting* placed = nullptr;
    bool expands = false;
    // If it does.
    nanobind::object metadata, last_equal;  ///< keep `slots`
    SlotViews slots{};
    std::int64_t num_expanded = 0;  ///< rows of its dispatches
  };

  std::optional<FoundHandle> find_handle(nanobind::handle handle) const;
  std::optional<FoundElastic> find_elastic(nanobind::handle handle) const;
  nanobind::object combine_expanded(const FoundElastic& found, ReadCombine call, Stream stream) const;
  std::optional<int> find_bound(nanobind::handle num_sms) const;
  /// A number of channels, half of num_sms; the package may have chosen it.
  std::optional<int> find_channels(nanobind::handle num_sms) const;
  nanobind::object new_event() const;
  nanobind::object new_routing(const PlacedRouting& routing, bool bounded) const;
  /// Makes the routing found again from the handle's tensors.
  void attach(nanobind::handle rank_prefix, nanobind::object routing) const;
  /// Makes the routing found from the first tensor of a handle of latency mode.
  void attach_slab(nanobind::handle src_info, const nanobind::object& routing) const;
  /// A call of latency mode was made, or its send half. -> the hook that makes the other half, or None
  nanobind::object made_half(nanobind::handle sent, const nanobind::object& routing) const;

  nanobind::object owner_;  ///< of calls_
  const Calls* calls_;
  nanobind::object group_;
  mutable std::int64_t last_rows_ = 0;  ///< of the last exact route
  nanobind::object event_, suggested_, link_, elastic_handle_, latency_link_, hook_;
  nanobind::object captured_;
  nanobind::object in_flight_;  ///< the group's ferry._latency.InFlight
};

void define_buffer_calls(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_BUFFER_CALLS_HPP
