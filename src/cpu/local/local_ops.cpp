#include "cpu/local/local_ops.hpp"

#include <fmt/format.h>

#include "cpu/local/expansion.hpp"

namespace ferry::cpu {
namespace {

Status check_no_stream(const LocalCall& call) {
  if (call.stream.handle == nullptr) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the stream is {}, expected null: backend \"cpu\" has no streams", call.operation,
                            call.stream.handle));
}

template <auto kCompute, typename Params>
Status compute(const LocalCall& call, const Params& params) {
  Status status = check_no_stream(call);
  if (status.ok()) kCompute(params);
  return status;
}

}  // namespace

const LocalOps& local_ops() {
  static constexpr LocalOps kOps{.count_layout = compute<plan::count_layout>,
                                 .write_arrivals = compute<plan::write_arrivals>,
                                 .expand_rows = compute<expand_rows>,
                                 .reduce_rows = compute<reduce_rows>,
                                 .quantize = compute<numeric::quantize_rows>,
                                 .dequantize = compute<numeric::dequantize_rows>,
                                 .select_experts = compute<numeric::choose_experts>};
  return kOps;
}

}  // namespace ferry::cpu
