/// One member of a set of processes that make steps together while some of them are lost and others take their place
/// (member_process.hpp).
///
/// A step is route, dispatch and combine, every other one latency mode; its tokens depend on the member's id and the
/// step, and its result is compared. Experts belong to the ids of the first view, and picks of those whose member is
/// lost are left out.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "common/bfloat16.hpp"
#include "fault/member_process.hpp"
#include "plan/to_size.hpp"

namespace ferry::test {
namespace {

using tools::bfloat16_from_float;

constexpr std::int64_t kNumTokens = 32;
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kNumTopk = 4;
constexpr std::int64_t kExpertsOfMember = 4;

/// The tokens of one step of one member.
class Step {
 public:
  Step(Group& group, const MembershipView& view, int num_first_ranks, std::uint64_t step)
      : group_(group), id_(view.ids[static_cast<std::size_t>(view.rank)]), step_(static_cast<std::int64_t>(step)) {
    for (std::int64_t entry = 0; entry < kNumTokens * kNumTopk; ++entry) {
      // Distinct experts in a token: latency mode adds up picks, and route counts ranks.
      const std::int64_t num_experts = kExpertsOfMember * num_first_ranks;
      const std::int64_t expert = (entry * 3 + entry / kNumTopk + id_ + step_ * 7) % num_experts;
      const auto home = std::ranges::find(view.ids, static_cast<int>(expert / kExpertsOfMember));
      const bool is_gone = home == view.ids.end();
      ids_.push_back(is_gone ? -1 : (home - view.ids.begin()) * kExpertsOfMember + expert % kExpertsOfMember);
    }
    for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) x_.push_back(bfloat16_from_float(value(i)));
  }

  Status run() {
    if (Status status = step_ % 2 == 0 ? run_throughput() : run_latency(); !status.ok()) return status;
    for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) {
      const float expected = value(i) * static_cast<float>(num_terms(i / kHidden));
      if (out_[to_size(i)] != bfloat16_from_float(expected)) {
        return Status(ErrorCode::kInternal, fmt::format("step {}: the sum of token {} is wrong", step_, i / kHidden));
      }
    }
    return {};
  }

 private:
  float value(std::int64_t i) const { return static_cast<float>((i + 3 * id_ + 5 * step_) % 8); }

  std::int64_t num_terms(std::int64_t token) const {
    const auto first = ids_.begin() + token * kNumTopk;
    if (step_ % 2 != 0) return std::count_if(first, first + kNumTopk, [](std::int64_t id) { return id >= 0; });
    std::set<std::int64_t> ranks;
    for (auto id = first; id < first + kNumTopk; ++id) {
      if (*id >= 0) ranks.insert(*id / kExpertsOfMember);
    }
    return static_cast<std::int64_t>(ranks.size());
  }

  std::int64_t num_experts() const { return kExpertsOfMember * group_.num_ranks(); }
  ConstTensorView topk_idx() const { return {ids_.data(), DType::kInt64, {kNumTokens, kNumTopk}}; }
  ConstTensorView x() const { return {x_.data(), DType::kBfloat16, {kNumTokens, kHidden}}; }
  TensorView out() {
    out_.resize(x_.size());
    return {out_.data(), DType::kBfloat16, {kNumTokens, kHidden}};
  }

  Status run_throughput() {
    Result<Routing> routing =
        group_.route({.topk_idx = topk_idx(), .topk_weights = {}}, {.num_experts = num_experts()});
    if (!routing.ok()) return routing.status();
    rows_.resize(to_size(routing->num_recv_rows() * kHidden));
    const TensorView rows(rows_.data(), DType::kBfloat16, {routing->num_recv_rows(), kHidden});
    DispatchInput in;
    in.x = x();
    DispatchOutput received;
    received.x = rows;
    if (Status status = group_.dispatch(*routing, in, received); !status.ok()) return status;
    CombineInput results;
    results.x = rows;
    CombineOutput sums;
    sums.x = out();
    return group_.combine(*routing, results, sums);
  }

  Status run_latency() {
    const std::int64_t capacity = kNumTokens * group_.num_ranks();
    rows_.resize(to_size(kExpertsOfMember * capacity * kHidden));
    const TensorView slab(rows_.data(), DType::kBfloat16, {kExpertsOfMember, capacity, kHidden});
    LatencyDispatchInput in;
    in.x = x();
    in.topk_idx = topk_idx();
    LatencyDispatchOutput received;
    received.x = slab;
    LatencyDispatchOptions options;
    options.num_experts = num_experts();
    options.max_tokens = kNumTokens;
    options.slab_capacity = capacity;
    Result<Routing> routing = group_.latency_dispatch(in, received, options);
    if (!routing.ok()) return routing.status();
    const std::vector<float> weights(ids_.size(), 1.0F);
    LatencyCombineInput results;
    results.x = slab;
    results.topk_weights = ConstTensorView(weights.data(), DType::kFloat32, {kNumTokens, kNumTopk});
    LatencyCombineOutput sums;
    sums.x = out();
    return group_.latency_combine(*routing, results, sums);
  }

  Group& group_;
  std::int64_t id_;
  std::int64_t step_;
  std::vector<std::int64_t> ids_;
  std::vector<std::uint16_t> x_;
  std::vector<std::uint16_t> rows_;
  std::vector<std::uint16_t> out_;
};

/// Makes a group of each view.
class Exchanges final : public MemberWork {
 public:
  explicit Exchanges(const MemberSettings& settings) : settings_(settings) {}

  Status form_group(Membership& members) override {
    Result<std::shared_ptr<Bootstrap>> bootstrap = members.bootstrap();
    if (!bootstrap.ok()) return bootstrap.status();
    GroupOptions options;
    options.backend = "cpu";
    const bool is_whole = members.view().num_ranks() == settings_.num_first_ranks;
    options.ranks_per_node = is_whole || settings_.ranks_per_node == 0 ? settings_.ranks_per_node : 1;
    options.timeout_ns = settings_.deadline_ns;
    Result<std::shared_ptr<Group>> group = Group::create(*bootstrap, options);
    if (!group.ok()) return group.status();
    // The old group goes last: over nodes that may take a second where a rank is stopped.
    group_ = *group;
    return {};
  }

  Status make_step(const MembershipView& view, std::uint64_t step) override {
    return Step(*group_, view, settings_.num_first_ranks, step).run();
  }

  NextViewOptions take_loss(const Status& status) override {
    return {.reason = status, .silent_ids = {}, .leave = false};
  }

 private:
  const MemberSettings& settings_;
  std::shared_ptr<Group> group_;
};

}  // namespace
}  // namespace ferry::test

int main(int num_arguments, char** arguments) {
  return ferry::test::run_member({arguments, static_cast<std::size_t>(num_arguments)}, [](const auto& settings) {
    return std::make_unique<ferry::test::Exchanges>(settings);
  });
}
