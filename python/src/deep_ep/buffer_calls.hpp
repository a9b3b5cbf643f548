#ifndef FERRY_PYTHON_DEEP_EP_BUFFER_CALLS_HPP
#define FERRY_PYTHON_DEEP_EP_BUFFER_CALLS_HPP

/// Calls of deep_ep's buffers, each in one step: arguments are read and checked, outputs allocated, ferry's calls made,
/// and results put together as the package returns them. Where an operation fails, its remaining collectives are
/// refused on all ranks.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>

#include "calls.hpp"
#include "deep_ep/checks.hpp"
#include "deep_ep/expansion.hpp"
#include "deep_ep/turn.hpp"
#include "latency.hpp"

namespace ferry::python::deep_ep {

/// Results of get_dispatch_layout as arguments of a new dispatch, and the choice of experts.
struct LayoutArguments {
  nanobind::handle tokens_per_rank{}, tokens_per_node{}, token_in_rank{}, tokens_per_expert{}, topk_idx{},
      topk_weights{};
};

/// Arguments of a new dispatch of the second generation that give the destinations of tokens.
struct ElasticRouteArguments {
  nanobind::handle topk_idx{}, topk_weights{}, expert_stats{}, num_experts{}, num_max_tokens{};
  nanobind::handle most_tokens{};  ///< bound of num_max_tokens, 0: none
  nanobind::handle alignment{};
};

/// Requested form of the results of a dispatch of the second generation.
struct ElasticForm {
  bool zero_padding = false;
  bool column_major_scales = false;
  // New dispatches only.
  bool copy_ids = true;  ///< the handle keeps a copy of the ids
  bool exact = true;     ///< as many rows as arrive
  bool expand = false;   ///< by expert, else by token
};

/// The last part of a call, which is made when the call's event is waited for, on the stream that is current then.
class DeferredCall {
 public:
  using Finish = std::function<nanobind::object(Stream)>;

  /// owner: keeps what `finish` refers to, and `calls`.
  DeferredCall(nanobind::object owner, const Calls& calls, Finish finish)
      : owner_(std::move(owner)), calls_(&calls), finish_(std::move(finish)) {}

  /// Makes it, and frees what it needed. A second time it is refused.
  nanobind::object make();

 private:
  nanobind::object owner_;
  const Calls* calls_;
  Finish finish_;
};

/// Requested form of a slab of latency mode.
struct FormOfSlab {
  bool use_fp8 = true;
  bool round_scale = false;
  bool use_ue8m0 = false;
};

/// Outputs of a new dispatch that are made while route waits for the number of rows: for the rows that arrive if all
/// ranks have as many tokens as this one and each token goes to as many ranks as it can.
class EarlyOutputs {
 public:
  /// `call` is used until the outputs are made, and has no outputs of its own.
  EarlyOutputs(const Calls& calls, const ReadDispatch& call, int num_topk)
      : calls_(calls), call_(call), num_topk_(num_topk) {}

  /// Makes none where memory would have to be taken for them.
  /// @throws nanobind::python_error
  void make();
  /// Null if fewer rows were made, or if too many of them would stay unused.
  MadeOutputs* get(std::int64_t num_rows);

 private:
  const Calls& calls_;
  const ReadDispatch& call_;
  int num_topk_;
  std::optional<MadeOutputs> outputs_;
};

/// Rows of each local expert, rounded up to a multiple of `alignment`.
nanobind::list aligned_counts(std::span<const std::int32_t> rows, std::int64_t alignment);

/// Classes of the package that calls create or accept.
struct BufferTypes {
  nanobind::object event, suggested, not_a_config, link, elastic_handle, latency_link;
};

/// Calls of one buffer. Each returns the result of the package's method of the same name, with the event of a
/// synchronous call. problem: None, or an exception from the package, which is raised on this rank after the call was
/// refused on all ranks. epilogue: an argument previous_event_before_epilogue.
/// num_sms: a bound, or a suggested number or None, which bound nothing. chunk_tokens: as num_sms, tokens of a chunk
/// between nodes. deferred: the call returns (DeferredCall,
/// tensors that it reads, event); the DeferredCall returns the results but the event.
class BufferCalls {
 public:
  /// group: the ferry.Group of `calls`. types: in the order of BufferTypes. steps: a deep_ep._steps.Steps. captured: a
  /// list, to which Routings are added that a graph has captured. to_all: a ferry.Routing that sends a row of each rank
  /// to all. narrow_ids: expert ids are i32, else i64.
  BufferCalls(nanobind::object calls, nanobind::object group, const nanobind::tuple& types, nanobind::object steps,
              nanobind::object captured, nanobind::object to_all, bool narrow_ids);

  nanobind::object layout(nanobind::handle problem, nanobind::handle topk_idx, nanobind::handle num_experts,
                          int ranks_per_node) const;

  /// KernelOptions::num_sms for an argument num_sms: the client's choice, 0 if there was none.
  int bound_of(nanobind::handle num_sms, const char* operation) const;

  /// KernelOptions::chunk_tokens for an argument chunk_tokens: the client's choice between nodes, else 0.
  int chunk_of(nanobind::handle chunk_tokens) const;

  nanobind::object dispatch(nanobind::handle problem, nanobind::handle x, const LayoutArguments& given,
                            nanobind::handle alignment, nanobind::handle most_rows, nanobind::handle chunk_tokens,
                            nanobind::handle num_sms) const;
  /// topk_idx, topk_weights: refused unless None.
  nanobind::object dispatch_again(nanobind::handle problem, nanobind::handle x, nanobind::handle handle,
                                  nanobind::handle topk_idx, nanobind::handle topk_weights,
                                  nanobind::handle chunk_tokens, nanobind::handle num_sms) const;
  nanobind::object combine(nanobind::handle problem, nanobind::handle x, nanobind::handle handle,
                           nanobind::handle topk_weights, nanobind::handle bias, nanobind::handle chunk_tokens,
                           nanobind::handle num_sms) const;

  nanobind::object elastic_dispatch(nanobind::handle problem, nanobind::handle x, const ElasticRouteArguments& given,
                                    const ElasticForm& form, bool deferred, nanobind::handle epilogue,
                                    nanobind::handle num_sms) const;
  /// given: None, or a dictionary of arguments that have to be as the handle's.
  nanobind::object elastic_dispatch_again(nanobind::handle problem, nanobind::handle x, nanobind::handle handle,
                                          nanobind::handle topk_weights, nanobind::handle given,
                                          const ElasticForm& form, bool deferred, nanobind::handle epilogue,
                                          nanobind::handle num_sms) const;
  /// single_rounding: sums of a rank and of a node are sent in fp32.
  nanobind::object elastic_combine(nanobind::handle problem, nanobind::handle x, nanobind::handle handle,
                                   nanobind::handle topk_weights, nanobind::handle bias, bool single_rounding,
                                   bool deferred, nanobind::handle epilogue, nanobind::handle num_sms) const;

  /// hook: a deep_ep._latency_handles.ReceiveHook, which is returned, or None if the call is not split.
  nanobind::object low_latency_dispatch(nanobind::handle problem, nanobind::handle x, nanobind::handle topk_idx,
                                        nanobind::handle max_tokens, nanobind::handle num_experts,
                                        nanobind::handle expert_stats, nanobind::handle wait_stats,
                                        nanobind::handle hook, const FormOfSlab& form) const;
  /// zero_copy: rows are those of the handle's combine memory. overlap: None, or (name of the argument that has words
  /// of tiles, these words, rows of a tile or None for all of an expert, threshold, multiprocessors).
  nanobind::object low_latency_combine(nanobind::handle problem, nanobind::handle x, nanobind::handle topk_idx,
                                       nanobind::handle topk_weights, nanobind::handle handle, nanobind::handle out,
                                       nanobind::handle wait_stats, bool zero_copy, nanobind::handle hook,
                                       nanobind::handle overlap) const;
  /// A hook has made its half on `stream`, a handle: the current stream waits for it. Raises known errors.
  void received_on(std::uintptr_t stream) const;
  /// Raises ferry.InvalidArgument for numbers that no call of latency mode takes.
  void check_latency_shape(nanobind::handle max_tokens, nanobind::handle hidden, nanobind::handle num_experts,
                           const char* operation) const;
  /// Link of a handle of latency mode that this buffer returned, and the shape of its slab.
  nanobind::object slab_of(nanobind::handle handle, const char* operation) const;

 private:
  struct NewDispatch;
  struct ElasticArrival;
  /// Routing of a handle's tensors, and how it was found. All ranks find the same: the tensor that carries the link has
  /// the same shape on all of them, so code that copies it on one rank copies it on every rank. If it does not, the
  /// ranks' calls differ, which ferry refuses.
  struct Plan {
    nanobind::object link;     ///< (ferry.Routing, whether it was made from expert ids); not valid for copies
    bool routes = false;       ///< the handle is a copy, which is routed again
    bool knows_topk = true;    ///< K of the routing is that of the weights
    nanobind::object routing;  ///< ferry.Routing of the link, or of the new route
  };
  /// Checked tensors of a handle.
  struct HandleTensors {
    nanobind::object carrier, token_in_rank;
    std::int64_t num_rows = 0;    ///< N
    std::int64_t num_tokens = 0;  ///< T
  };
  /// Checked parts of an EPHandle.
  struct ElasticHandle {
    bool expands = false;
    nanobind::object topk_idx, metadata, last_equal;  ///< the last two keep `slots`
    std::int64_t num_tokens = 0;                      ///< T
    std::int64_t num_topk = 0;                        ///< K
    std::int64_t num_rows = 0;                        ///< N
    SlotViews slots{};
  };
  /// A handle of latency mode.
  struct Slab {
    nanobind::object link, routing;
    std::int64_t num_local = 0, num_rows = 0, hidden = 0;  ///< [L, R * M, H]
  };

  bool has_narrow_ids() const { return ids_ == DType::kInt32; }
  bool has_several_nodes() const { return calls_->group().topology().num_nodes() > 1; }

  void read_route(const Checks& checks, const LayoutArguments& given, NewDispatch& to) const;
  NewDispatch read_dispatch(nanobind::handle x, const LayoutArguments& given, nanobind::handle alignment,
                            nanobind::handle most_rows, nanobind::handle num_sms, bool exact) const;
  nanobind::object dispatch_in_node(Turn& turn, NewDispatch& to) const;
  nanobind::object dispatch_to_nodes(Turn& turn, NewDispatch& to) const;
  /// Exchanges the choices of each local expert on all ranks, unless the route has counted them. -> a function that
  /// returns them; not valid if the route has counted them
  nanobind::object counts_of(Turn& turn, const Routing& routing, const NewDispatch& to) const;
  nanobind::object finish_dispatch(const NewDispatch& to, const nanobind::object& routing, Received& received,
                                   const nanobind::tuple& handle, const nanobind::object& read_counts) const;

  Plan plan_of(nanobind::handle handle) const;
  HandleTensors tensors_of(const Checks& checks, nanobind::handle handle) const;
  /// Routes a copied handle again; refuses one that is neither linked nor a copy. -> the Routing of the plan
  const Routing& routing_of(Turn& turn, Plan& plan, const Checks& checks, nanobind::handle handle,
                            const HandleTensors& tensors, int num_sms) const;

  bool needs_route(nanobind::handle handle) const;
  ElasticHandle elastic_handle_of(const Checks& checks, nanobind::handle handle) const;
  /// The handle's ferry.Routing; `routes`: a new one.
  nanobind::object elastic_routing_of(Turn& turn, nanobind::handle handle, bool routes, int num_sms) const;
  void check_combined(const Checks& checks, const ElasticHandle& found, const TensorView& x) const;
  /// The last part of a new dispatch. event: of the call; not valid if it is deferred.
  nanobind::object finish_elastic(ElasticArrival& arrived, Stream stream, const nanobind::object& event) const;
  /// Results of a deferred call. read: tensors, None, or objects that are not valid.
  nanobind::object defer(std::initializer_list<nanobind::object> read, DeferredCall::Finish finish) const;

  Slab find_slab(nanobind::handle handle, const char* operation) const;
  void read_overlap(const Checks& checks, const Slab& slab, nanobind::handle overlap, ReadLatencyCombine& call) const;
  /// Rows of a combine without a copy. kept: tensors of a split call, or None.
  TensorView combine_memory_of(const Checks& checks, const Slab& slab, nanobind::handle kept) const;

  /// A combine of rows of `routing`, as announced to the turn.
  Combined combine_rows(Turn& turn, const Routing& routing, const ReadCombine& call) const;
  Received dispatch_rows(Turn& turn, const Routing& routing, const ReadDispatch& call,
                         MadeOutputs* early = nullptr) const;
  PlacedRouting route(Turn& turn, Collective collective, const TensorView& ids, const RouteOptions& options,
                      const std::function<EarlyTables()>& while_waiting = {}) const;

  /// Raises errors of earlier calls that are known by now.
  void raise_known_errors() const;
  /// Checks::biases. The package announces tensors of tuples and lists to the call's stream, this those of others.
  nanobind::list read_biases(const Checks& checks, nanobind::handle bias, std::int64_t num_tokens, std::int64_t hidden,
                             CombineInput& in) const;
  /// Event that the last part of a call waits for, or None.
  nanobind::object epilogue_event(nanobind::handle epilogue, const char* operation) const;
  /// Makes the rest of a call wait for an epilogue's event.
  void wait_for(nanobind::handle event) const;
  nanobind::object new_event() const;
  nanobind::object new_routing(const PlacedRouting& routing, bool bounded) const;
  /// Attaches a Link to a handle, or to the tensor of it that carries the link.
  void link_handle(const nanobind::tuple& handle, nanobind::object routing, bool knows_topk) const;
  void link_carrier(const nanobind::object& carrier, nanobind::object routing, bool knows_topk) const;
  /// A call of latency mode was made, or its send half on `stream`, where the hook will make the other half.
  void made_half(nanobind::handle hook, nanobind::handle routing, Stream stream) const;

  nanobind::object owner_;  ///< of calls_
  const Calls* calls_;
  nanobind::object group_;
  BufferTypes types_;
  nanobind::object steps_;
  nanobind::object captured_;
  nanobind::object to_all_;
  DType ids_;
  nanobind::object in_flight_;          ///< the group's ferry._latency.InFlight
  mutable std::int64_t last_rows_ = 0;  ///< of the last exact route
};

void define_calls(nanobind::module_& module);

}  // namespace ferry::python::deep_ep

#endif  // FERRY_PYTHON_DEEP_EP_BUFFER_CALLS_HPP
