#ifndef FERRY_PYTHON_CALLS_HPP
#define FERRY_PYTHON_CALLS_HPP

/// Calls of a group on objects of Python: arguments are read and checked, outputs allocated, the stream asked for, the
/// call made. Where that fails before the call is made, a call that all ranks refuse takes its place, so that no rank
/// waits for this one.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "allocator.hpp"
#include "arguments.hpp"
#include "ferry/group.hpp"
#include "ferry/known_memory.hpp"
#include "gil.hpp"
#include "placed.hpp"

namespace ferry::python {

/// Scope of a call whose tensors have been read: their devices are known, and the GIL is released. Every call needs it:
/// calls of a group wait for each other, and the callback of a route takes the GIL.
struct CallScope {
  KnownMemory known;
  GilReleased released;
};

/// A dispatch whose inputs have been read.
struct ReadDispatch {
  nanobind::handle x{}, scales{};  ///< whose dtypes the outputs have
  DispatchInput in{};
  DispatchOutput out{};  ///< absent: to be made
  bool tables = false;   ///< ids and, with `weights`, weights are received too
  bool weights = false;
  bool narrow_ids = false;  ///< received ids are i32, else i64
  bool bounded = false;     ///< rows of the route were bounded
  /// Scales that are made have strides (1, rows rounded up to 4), as bulk tensor copies of 16 bytes require.
  bool column_major_scales = false;
  DispatchOptions options{};
};

/// Tensors that a dispatch made; the others are not valid.
struct Received {
  nanobind::object x, scales, topk_idx, topk_weights;
};

/// Outputs of a dispatch: those that were made, and views of all.
struct MadeOutputs {
  Received made;
  DispatchOutput out;
};

/// Rows that a dispatch receives.
struct ReceivedShape {
  Layout layout = Layout::kTokens;
  std::int64_t num_rows = 0;
  int num_topk = 0;
};

/// A combine whose inputs have been read.
struct ReadCombine {
  nanobind::handle x{};  ///< whose dtype the sums have
  CombineInput in{};
  TensorView out{};  ///< absent: to be made
  CombineOptions options{};
};

struct Combined {
  nanobind::object x;        ///< not valid if the output was given
  nanobind::object weights;  ///< None without weights
};

/// Classes of the package whose objects calls return or take.
struct CallTypes {
  nanobind::object routing, received, combined;
  LoadTypes load;
};

class Calls {
 public:
  Calls(std::shared_ptr<Group> group, std::shared_ptr<SymmetricPool> pool, Place place, nanobind::object memory,
        CallTypes types)
      : group_(std::move(group)),
        allocator_(std::move(memory), std::move(pool), place),
        place_(place),
        types_(std::move(types)) {}

  Group& group() const { return *group_; }
  const Allocator& allocator() const { return allocator_; }
  Place place() const { return place_; }
  const CallTypes& types() const { return types_; }

  /// A ferry.Routing. owner: the ferry.Group; it holds this object, which therefore cannot hold the group.
  nanobind::object new_routing(const PlacedRouting& routing, nanobind::handle owner, bool has_weights,
                               bool bounded) const;

  /// The outputs of a dispatch; absent ones are made. `quickly`: none if memory would have to be taken for them.
  /// @throws nanobind::python_error
  std::optional<MadeOutputs> make_outputs(const ReceivedShape& shape, const ReadDispatch& call,
                                          bool quickly = false) const;

  /// Make the outputs that are absent, and dispatch or combine. If they cannot be made, the call is refused on all
  /// ranks, so that none waits for this one.
  /// early: outputs of this call that were made for at least as many rows, or null. Their scales lie by row.
  Received dispatch(const Routing& routing, const ReadDispatch& call, Stream stream,
                    MadeOutputs* early = nullptr) const;

  Combined combine(const Routing& routing, const ReadCombine& call, Stream stream) const;

  /// Raises ferry.InvalidArgument unless it is a ferry.Routing. Makes sure that native_of finds its Routing.
  void check_routing(nanobind::handle routing, const char* operation) const;
  /// Routing of a ferry.Routing, which keeps it.
  static const Routing& native_of(nanobind::handle routing);
  /// The same, or an empty Routing for anything but a ferry.Routing of `owner`.
  Routing routing_or_none(nanobind::handle routing, nanobind::handle owner) const;

  /// Calls that all ranks refuse, in place of one that cannot be made. Their failure is not reported; an error that a
  /// signal's handler raises meanwhile is.
  void refuse_route(Stream stream) const;
  void refuse_dispatch(const Routing& routing, Stream stream) const;
  void refuse_combine(const Routing& routing, Stream stream) const;
  void refuse_latency_dispatch(Stream stream) const;
  void refuse_latency_combine(const Routing& routing, Stream stream) const;

 private:
  /// Outputs with room for some more rows, which later calls with a few more rows can reuse. None where that is of no
  /// use, or where memory would have to be taken.
  std::optional<MadeOutputs> make_with_room(const Routing& routing, const ReadDispatch& call) const;
  /// Cuts outputs that were made for more rows to the rows of their views.
  void keep_first_rows(MadeOutputs& outputs) const;

  /// Size from which outputs have found no memory for spare rows.
  mutable std::int64_t no_room_bytes_ = std::numeric_limits<std::int64_t>::max();
  std::shared_ptr<Group> group_;
  Allocator allocator_;
  Place place_;
  CallTypes types_;
};

/// Quantization of an argument `quantize`.
Quantization quantization_of(nanobind::handle mode, const char* operation);
/// Format of an argument `wire_format`: None or "fp8".
WireFormat wire_format_of(nanobind::handle format, const char* operation);
/// Rows that quantising makes, [rows, hidden].
Wanted quantized_rows(const TableTypes& types, Quantization quantize, std::int64_t rows, std::int64_t hidden);
/// Their scales, [rows, S].
Wanted quantized_scales(const TableTypes& types, Quantization quantize, std::int64_t rows, std::int64_t hidden);

/// Group.route, Group.dispatch and Group.combine of the package.
void define_calls(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_CALLS_HPP
