#ifndef FERRY_TESTS_EXCHANGE_CHECK_HPP
#define FERRY_TESTS_EXCHANGE_CHECK_HPP

/// Runs a prepared case on one rank with the public API and compares every byte of every output with the oracle's.

#include <optional>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

/// What this rank of `prepared` gives to route.
class RouteArguments {
 public:
  RouteArguments(const PreparedCase& prepared, int rank);
  const RouteInput& input() const { return input_; }
  const RouteOptions& options() const { return options_; }

 private:
  std::vector<std::int64_t> ids_;
  std::vector<std::int32_t> narrow_ids_;
  std::vector<float> weights_;
  RouteInput input_;
  RouteOptions options_;
};

/// An optional tensor of a call: memory only where it is used.
class OptionalTensor {
 public:
  OptionalTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image, bool used);
  TensorView view() const { return tensor_ ? tensor_->view() : TensorView(); }
  void expect_equal(RankContext& context, const TensorImage& expected, const std::string& what) const;

 private:
  std::optional<TestTensor> tensor_;
};

/// The tensors of one rank's dispatch, outputs filled with a pattern. Tests may spoil `in` and `out` before they call.
class DispatchTensors {
 public:
  DispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t dispatch_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  DispatchInput in;
  DispatchOutput out;
  DispatchOptions options;

 private:
  const RankDispatch& data_;
  TestTensor x_, out_x_;
  OptionalTensor in_scales_, out_scales_, in_weights_, out_weights_, out_ids_, out_source_;
};

/// The same for a combine.
class CombineTensors {
 public:
  CombineTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t combine_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  CombineInput in;
  CombineOutput out;
  CombineOptions options;

 private:
  const RankCombine& data_;
  TestTensor x_, out_x_;
  OptionalTensor weights_, out_weights_, topk_weights_, bias0_, bias1_;
};

/// Routes; compares everything that the Routing says. Empty on failure, which is reported.
Routing check_route(RankContext& context, Group& group, const PreparedCase& prepared);
void check_dispatch(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                    std::size_t dispatch_idx);
void check_combine(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                   std::size_t combine_idx);

/// One route, then all dispatches and combines of the case with that Routing.
void check_case(RankContext& context, Group& group, const PreparedCase& prepared);

}  // namespace ferry::test

#endif  // FERRY_TESTS_EXCHANGE_CHECK_HPP
