#ifndef FERRY_TESTS_EXCHANGE_CHECK_HPP
#define FERRY_TESTS_EXCHANGE_CHECK_HPP

/// Runs a prepared case on one rank with the public API and compares every byte of every output with the oracle's.

#include <optional>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

/// Arguments of route on this rank of `prepared`.
class RouteArguments {
 public:
  /// `counted`: ids of tokens beyond num_counted_tokens are invalid, for calls that do not read them.
  RouteArguments(const RankContext& context, const Group& group, const PreparedCase& prepared, bool counted = false);
  const RouteInput& input() const { return input_; }
  const RouteOptions& options() const { return options_; }
  /// Writes the ids and weights of another case of equal shapes into the same memory.
  void refill(const RankContext& context, const PreparedCase& prepared);

 private:
  bool has_table(const PreparedCase& prepared) const {
    return on_device_ && prepared.spec.table_on_device && prepared.given.options.placement.present();
  }

  bool on_device_;
  bool counted_;
  PlainMemory ids_;
  PlainMemory weights_;
  PlainMemory table_;  ///< table of a placement
  RouteInput input_;
  RouteOptions options_;
};

/// An optional tensor of a call, with memory only if it is used.
class OptionalTensor {
 public:
  OptionalTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image, bool used);
  TensorView view() const { return tensor_ ? tensor_->view() : TensorView(); }
  void refill(const TensorImage& image);
  void expect_equal(RankContext& context, const TensorImage& expected, const std::string& what) const;

 private:
  std::optional<TestTensor> tensor_;
};

/// Tensors of one rank's dispatch, with outputs filled with a pattern. Tests may change `in` and `out` before they
/// call.
class DispatchTensors {
 public:
  DispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t dispatch_idx);
  /// Writes the inputs of another case of equal shapes into the same memory, and resets the outputs.
  void refill(const RankContext& context, const PreparedCase& prepared, std::size_t dispatch_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  DispatchInput in;
  DispatchOutput out;
  DispatchOptions options;

 private:
  const RankDispatch* data_;
  TestTensor x_, out_x_;
  OptionalTensor in_scales_, out_scales_, in_weights_, out_weights_, out_ids_, out_source_;
};

/// Tensors of one rank's combine, like DispatchTensors.
class CombineTensors {
 public:
  CombineTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t combine_idx);
  /// Writes the inputs of another case of equal shapes into the same memory, and resets the outputs.
  void refill(const RankContext& context, const PreparedCase& prepared, std::size_t combine_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  CombineInput in;
  CombineOutput out;
  CombineOptions options;

 private:
  const RankCombine* data_;
  TestTensor x_, out_x_;
  OptionalTensor weights_, out_weights_, topk_weights_, bias0_, bias1_;
};

/// Place of a Routing's counts. A Routing made during the capture of its stream has none on the host.
enum class Counts { kOnHost, kInMemory };

/// Compares all accessors of the Routing.
void expect_routing(RankContext& context, const Group& group, const Routing& routing, const PreparedCase& prepared,
                    Counts counts = Counts::kOnHost);

/// Compares the view that only Routings of latency_dispatch have.
void expect_source_ranges(RankContext& context, const Group& group, const Routing& routing,
                          const PreparedCase& prepared);

/// Routes; compares all accessors of the Routing, and its tables by channel. Empty on failure, which is reported.
Routing check_route(RankContext& context, Group& group, const PreparedCase& prepared);
void check_dispatch(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                    std::size_t dispatch_idx, const KernelOptions& kernel = {});
void check_combine(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                   std::size_t combine_idx, const KernelOptions& kernel = {});

/// Makes one route, then all dispatches and combines of the case with that Routing.
void check_case(RankContext& context, Group& group, const PreparedCase& prepared, const KernelOptions& kernel = {});

}  // namespace ferry::test

#endif  // FERRY_TESTS_EXCHANGE_CHECK_HPP
