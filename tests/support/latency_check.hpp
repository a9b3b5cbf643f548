#ifndef FERRY_TESTS_LATENCY_CHECK_HPP
#define FERRY_TESTS_LATENCY_CHECK_HPP

/// Runs calls of latency mode on one rank, whole or in halves, and compares every byte of every output with the
/// oracle's. Cases are those of support/exchange_case with layout kSlab; each dispatch of a case makes a Routing for
/// its combines. The code is the same for every backend: `finish` and the memory of tensors hide the differences.

#include <optional>
#include <string>

#include "support/exchange_check.hpp"

namespace ferry::test {

/// Tensors of one rank's latency_dispatch, with outputs filled with a pattern. Tests may change the public members. A
/// case with an idle tail passes the number of counted tokens, and has invalid ids behind them.
class LatencyDispatchTensors {
 public:
  LatencyDispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t dispatch_idx);
  /// Writes the inputs of another case of equal shapes into the same memory, and resets the outputs.
  void refill(const RankContext& context, const PreparedCase& prepared, std::size_t dispatch_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  LatencyDispatchInput in;
  LatencyDispatchOutput out;
  LatencyDispatchOptions options;

 private:
  void write_count(const RankContext& context, const PreparedCase& prepared);

  bool on_device_;
  RouteArguments route_;
  PlainMemory count_;
  const RankDispatch* data_;
  TestTensor x_, out_x_;
  OptionalTensor in_scales_, out_scales_;
};

/// Tensors of one rank's latency_combine, like LatencyDispatchTensors.
class LatencyCombineTensors {
 public:
  LatencyCombineTensors(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t combine_idx);
  void refill(const RankContext& context, const PreparedCase& prepared, std::size_t combine_idx);
  void expect_received(RankContext& context, const std::string& where) const;
  void expect_untouched(RankContext& context, const std::string& where) const;

  LatencyCombineInput in;
  LatencyCombineOutput out;
  LatencyCombineOptions options;

 private:
  const RankCombine* data_;
  TestTensor x_, out_x_;
  OptionalTensor topk_weights_;
};

/// M of these calls: the most tokens of any rank, plus the case's spare tokens.
std::int64_t latency_max_tokens(const PreparedCase& prepared);

/// GroupOptions::latency_bytes for these cases on a group of this backend; 0 if it has no latency mode.
std::size_t latency_bytes_of(const char* backend, const std::vector<PreparedCase>& cases);

/// One dispatch of a case and the combines on its Routing. Each step makes a call or half a call, compares the results
/// known by then, and reports differences; it returns false after an error of the call.
class LatencyExchange {
 public:
  LatencyExchange(RankContext& context, Group& group, const PreparedCase& prepared, std::size_t dispatch_idx = 0,
                  const KernelOptions& kernel = {});

  bool dispatch();
  bool combine(std::size_t combine_idx);

  bool send_dispatch();
  bool send_combine(std::size_t combine_idx);
  /// Receives the last send.
  bool receive();

  const PreparedCase& prepared() const { return *prepared_; }
  const Routing& routing() const { return routing_; }
  LatencyDispatchTensors& dispatch_tensors() { return *dispatch_; }

 private:
  bool call_dispatch(bool split);
  bool call_combine(std::size_t combine_idx, bool split);
  bool finish_dispatch(const Status& status);
  bool finish_combine(const Status& status);
  void note_views();
  void expect_same_views() const;
  std::string where(const char* call, std::size_t idx) const;

  RankContext* context_;
  Group* group_;
  const PreparedCase* prepared_;
  std::size_t dispatch_idx_;
  std::size_t combine_idx_ = 0;
  KernelOptions kernel_;
  std::optional<LatencyDispatchTensors> dispatch_;
  std::optional<LatencyCombineTensors> combine_;
  Routing routing_;
  std::vector<ConstTensorView> views_;  // views of routing_ when its dispatch was sent
};

enum class Halves { kTogether, kSplit };

/// Makes all dispatches of the case, and all combines on each Routing.
void check_latency_case(RankContext& context, Group& group, const PreparedCase& prepared, Halves halves,
                        const KernelOptions& kernel = {});

/// Draws a random case of layout kSlab with several dispatches and combines of both orders, and of both formats of the
/// ranks' sums unless `fp8_sums` is false.
ExchangeCase draw_latency_case(std::mt19937_64& random, int num_ranks, bool fp8_sums = true);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATENCY_CHECK_HPP
