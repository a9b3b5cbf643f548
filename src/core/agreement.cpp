#include "core/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/placement_digest.hpp"
#include "ferry/quantization.hpp"
#include "ferry/routing.hpp"
#include "ferry/types.hpp"

namespace ferry {
namespace {

// Fields of operations with has_placement_digest.
constexpr std::size_t kNumExpertsField = 1;
constexpr std::size_t kNumPhysicalField = 2;
constexpr std::string_view kPhysicalField = "physical experts of the placement (0: none is given)";
constexpr std::string_view kChoiceField = "choice of replicas (0: nearest, 1: round robin)";
constexpr std::string_view kOnDeviceField = "presence of physical_to_logical_view";
constexpr std::string_view kPlacementField = "expert_to_rank";
constexpr std::array<std::string_view, 11> kRouteFields = {
    "num_topk",     "num_experts",      kPhysicalField,  kChoiceField, kOnDeviceField,
    "layout",       "expert_alignment", "slab_capacity", "max_tokens", "presence of topk_weights",
    kPlacementField};
constexpr std::array<std::string_view, 10> kDispatchFields = {"routing (number of the call that made it)",
                                                              "row bytes of x",
                                                              "dtype of x",
                                                              "quantize",
                                                              "number of scales per row",
                                                              "dtype of scales",
                                                              "scales present",
                                                              "output topk_idx present",
                                                              "output topk_weights present",
                                                              "output source present"};
constexpr std::array<std::string_view, 6> kCombineFields = {"routing (number of the call that made it)",
                                                            "row bytes of x",
                                                            "dtype of x",
                                                            "weighted",
                                                            "input weights present",
                                                            "wire_format"};

constexpr std::array<std::string_view, 14> kLatencyDispatchFields = {
    "num_topk",        "num_experts",  kPhysicalField,  kChoiceField,
    kOnDeviceField,    "max_tokens",   "slab_capacity", "presence of topk_weights",
    "row bytes of x",  "dtype of x",   "quantize",      "number of scales per row",
    "dtype of scales", kPlacementField};
constexpr std::array<std::string_view, 6> kLatencyCombineFields = {
    "routing (number of its dispatch)", "row bytes of x", "dtype of x", "order",
    "presence of topk_weights",         "wire_format"};

static_assert(kPlacementDigestBytes <= kCallMessageBytes);

/// Digest of a record that may be in memory that its rank writes, so its length is clamped.
std::span<const char> digest_of(const CallRecord& record) {
  const auto length = static_cast<std::size_t>(std::clamp<std::int32_t>(record.message_bytes, 0, kCallMessageBytes));
  return std::span<const char>(record.message).first(length);
}

/// A field's value as the program wrote it.
std::string describe_value(std::string_view name, std::int64_t value) {
  constexpr std::array<std::string_view, 3> kLayouts = {"kTokens", "kExperts", "kSlab"};
  constexpr std::array<std::string_view, 5> kModes = {"kNone", "kFp8", "kFp8PowerOfTwo", "kFp8Ue8m0", "kInt8"};
  constexpr std::array<std::string_view, 2> kWireFormats = {"kAsGiven", "kFp8"};
  const auto of = [value](std::span<const std::string_view> names) {
    const bool is_known = value >= 0 && value < static_cast<std::int64_t>(names.size());
    return is_known ? std::string(names[static_cast<std::size_t>(value)]) : std::to_string(value);
  };
  if (name == "layout") return of(kLayouts);
  if (name == "quantize") return of(kModes);
  if (name == "wire_format") return of(kWireFormats);
  if (name.starts_with("dtype")) return std::string(to_string(static_cast<DType>(value)));
  return std::to_string(value);
}

/// Text for a field that differs.
std::string describe_field(std::string_view name, const std::array<std::size_t, 2>& ranks,
                           std::array<std::int64_t, 2> values) {
  if (name == kChoiceField) {
    const std::array<bool, 2> homeless = {(values[0] & kHomelessBit) != 0, (values[1] & kHomelessBit) != 0};
    for (std::int64_t& value : values) value &= ~kHomelessBit;
    if (values[0] == values[1]) {
      return fmt::format("allow_homeless: rank {} has {}, rank {} has {}", ranks[0], homeless[0], ranks[1],
                         homeless[1]);
    }
  }
  return fmt::format("{}: rank {} has {}, rank {} has {}", name, ranks[0], describe_value(name, values[0]), ranks[1],
                     describe_value(name, values[1]));
}

/// Text for placements whose hashes differ.
std::string describe_difference(const CallRecord& first, const CallRecord& other, std::size_t other_rank) {
  const std::int64_t num_physical = first.fields[kNumPhysicalField];
  if (num_physical != 0) {
    return describe_homes_difference(digest_of(first), digest_of(other), other_rank, num_physical);
  }
  return describe_placement_difference(digest_of(first), digest_of(other), other_rank, first.fields[kNumExpertsField]);
}

}  // namespace

std::string_view to_string(Operation operation) {
  switch (operation) {
    case Operation::kRoute:
      return "route";
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kLatencyDispatch:
      return "latency_dispatch";
    case Operation::kLatencyCombine:
      return "latency_combine";
    case Operation::kDestroy:
      return "destroy";
  }
  return "unknown call";
}

std::span<const std::string_view> field_names(Operation operation) {
  switch (operation) {
    case Operation::kRoute:
      return kRouteFields;
    case Operation::kDispatch:
      return kDispatchFields;
    case Operation::kCombine:
      return kCombineFields;
    case Operation::kLatencyDispatch:
      return kLatencyDispatchFields;
    case Operation::kLatencyCombine:
      return kLatencyCombineFields;
    case Operation::kDestroy:
      return {};
  }
  return {};
}

void CallRecord::assign(const CallRecord& other) {
  operation = other.operation;
  code = other.code;
  num_fields = other.num_fields;
  message_bytes = other.message_bytes;
  fields = other.fields;
  std::copy_n(other.message.data(), digest_of(other).size(), message.data());
}

void CallRecord::set_status(const Status& status) {
  code = status.code();
  const std::size_t length = std::min(status.message().size(), message.size());
  std::copy_n(status.message().data(), length, message.data());
  message_bytes = static_cast<std::int32_t>(length);
}

Status check_agreement(std::span<const CallRecord* const> records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank] == nullptr) continue;
    const CallRecord& record = *records[rank];
    if (record.code == ErrorCode::kOk) continue;
    const auto length = static_cast<std::size_t>(std::clamp<std::int32_t>(record.message_bytes, 0, kCallMessageBytes));
    return Status(record.code, fmt::format("rank {}: {}", rank, std::string_view(record.message.data(), length)),
                  static_cast<int>(rank));
  }
  const auto has_record = [](const CallRecord* record) { return record != nullptr; };
  const auto first_rank = static_cast<std::size_t>(std::ranges::find_if(records, has_record) - records.begin());
  if (first_rank == records.size()) return {};
  const CallRecord& first = *records[first_rank];
  for (std::size_t rank = first_rank + 1; rank < records.size(); ++rank) {
    if (records[rank] == nullptr) continue;
    const CallRecord& record = *records[rank];
    if (record.operation != first.operation) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("ranks made different calls: rank {} called {}, rank {} called {}; every rank must make the "
                      "same calls on a group in the same order",
                      first_rank, to_string(first.operation), rank, to_string(record.operation)),
          static_cast<int>(rank));
    }
    const auto names = field_names(first.operation);
    for (std::size_t field = 0; field < names.size(); ++field) {
      if (record.fields[field] == first.fields[field]) continue;
      const bool placement = has_placement_digest(first.operation) && names[field] == kPlacementField;
      const std::string difference =
          placement ? describe_difference(first, record, rank)
                    : describe_field(names[field], {first_rank, rank}, {first.fields[field], record.fields[field]});
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{}: ranks disagree on {}; it must be the same on every rank",
                                to_string(first.operation), difference),
                    static_cast<int>(rank));
    }
  }
  return {};
}

}  // namespace ferry
