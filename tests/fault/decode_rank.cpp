/// One member of a set of processes that decode together while some of them are lost and others take their place
/// (member_process.hpp). They keep one group, which they renew. On GPUs each captures a graph of a dispatch, a combine
/// and, if the group masks lost ranks, a query of the mask, and replays it from then on, whoever is lost; on CPUs it
/// makes these calls.
///
/// A step is one replay. Its tokens depend on the member's id and the step. Sums and numbers of rows are compared with
/// what follows from the members that are present: experts belong to the ids of the first view, and picks of experts of
/// an absent member add nothing. A step that fails, or whose mask is another one, does not count, and is made again.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/bfloat16.hpp"
#include "fault/member_process.hpp"
#include "plan/to_size.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {
namespace {

using tools::bfloat16_from_float;

constexpr std::int64_t kNumTokens = 8;
constexpr std::int64_t kHidden = 1024;
constexpr std::int64_t kNumTopk = 4;
constexpr std::int64_t kExpertsOfMember = 4;
constexpr std::size_t kPoolBytes = std::size_t{256} << 20;
/// Limit of waits that no lost rank can end: creation of a group on a busy machine.
constexpr std::int64_t kPatienceNs = 20 * kNsPerSecond;

/// Elements in memory of the group's backend.
template <typename T>
class Elements {
 public:
  Elements(bool on_gpu, std::int64_t count) : on_gpu_(on_gpu), host_(to_size(count)) {
    if (on_gpu) device_ = DeviceMemory(size_bytes());
  }
  T* data() { return on_gpu_ ? reinterpret_cast<T*>(device_.data()) : host_.data(); }
  void write(const std::vector<T>& values) {
    host_ = values;
    if (on_gpu_) copy_to_device(device_.data(), host_.data(), size_bytes());
  }
  const std::vector<T>& read() {
    if (on_gpu_) copy_from_device(host_.data(), device_.data(), size_bytes());
    return host_;
  }

 private:
  std::size_t size_bytes() const { return host_.size() * sizeof(T); }
  bool on_gpu_;
  std::vector<T> host_;
  DeviceMemory device_;
};

/// The tokens of one step of one member.
struct Tokens {
  std::int64_t id = 0;
  std::int64_t step = 0;
  std::int64_t num_experts = 0;

  std::int64_t expert(std::int64_t entry) const { return (entry * 3 + entry / kNumTopk + id + step * 7) % num_experts; }
  static float weight(std::int64_t entry) { return static_cast<float>(1 + entry % 3); }
  float value(std::int64_t i) const { return static_cast<float>((i + 3 * id + 5 * step) % 8); }
};

template <typename Make>
auto make(std::int64_t count, Make make_one) {
  std::vector<decltype(make_one(0))> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(make_one(i));
  return values;
}

class Decoder {
 public:
  Decoder(Group& group, int id, bool masks)
      : group_(group), id_(id), masks_(masks), on_gpu_(group.backend() == "cuda") {
    weights_.write(make(kNumTokens * kNumTopk, [](std::int64_t entry) { return Tokens::weight(entry); }));
    if (on_gpu_) stream_.emplace();
  }

  /// On GPUs: captures the step. On CPUs nothing.
  Status capture() {
    if (!on_gpu_) return {};
    graph_.emplace();
    graph_->begin(stream_->get());
    Status status = call();
    graph_->end();
    if (status.ok()) graph_->prepare();
    return status;
  }

  /// Makes the step, and returns the mask; zeros if the group does not mask.
  Result<std::vector<std::int32_t>> run(std::uint64_t step) {
    const Tokens tokens = tokens_of(id_, step);
    ids_.write(make(kNumTokens * kNumTopk, [&](std::int64_t entry) { return tokens.expert(entry); }));
    x_.write(make(kNumTokens * kHidden, [&](std::int64_t i) { return bfloat16_from_float(tokens.value(i)); }));
    Status status;
    if (graph_) {
      graph_->launch();
    } else {
      status = call();
    }
    if (status.ok()) status = group_.wait(stream());
    if (!status.ok()) return status;
    return mask_.read();
  }

  /// Compares the results of the last step, which was made by the ranks `present`.
  Status check(std::uint64_t step, const std::vector<int>& present) {
    const Tokens tokens = tokens_of(id_, step);
    const std::vector<std::uint16_t>& out = out_.read();
    for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) {
      float weights = 0;
      for (std::int64_t k = 0; k < kNumTopk; ++k) {
        const std::int64_t entry = i / kHidden * kNumTopk + k;
        if (is_at(tokens.expert(entry), present)) weights += Tokens::weight(entry);
      }
      if (out[to_size(i)] != bfloat16_from_float(tokens.value(i) * weights)) {
        return wrong(step, fmt::format("the sum of token {}", i / kHidden));
      }
    }
    std::vector<std::int32_t> expected(kExpertsOfMember, 0);
    for (const int rank : present) {
      const Tokens theirs = tokens_of(rank, step);
      for (std::int64_t entry = 0; entry < kNumTokens * kNumTopk; ++entry) {
        const std::int64_t local = theirs.expert(entry) - id_ * kExpertsOfMember;
        if (local >= 0 && local < kExpertsOfMember) ++expected[to_size(local)];
      }
    }
    std::vector<std::int32_t> counts(expected.size());
    const ConstTensorView view = routing_.num_rows_per_local_expert_view();
    const std::size_t bytes = counts.size() * sizeof(counts[0]);
    on_gpu_ ? copy_from_device(counts.data(), view.data, bytes)
            : static_cast<void>(std::memcpy(counts.data(), view.data, bytes));
    return counts == expected ? Status() : wrong(step, fmt::format("the number of rows {}", fmt::join(counts, ", ")));
  }

 private:
  static bool is_at(std::int64_t expert, const std::vector<int>& ranks) {
    return std::ranges::binary_search(ranks, static_cast<int>(expert / kExpertsOfMember));
  }
  Status wrong(std::uint64_t step, const std::string& what) const {
    return Status(ErrorCode::kInternal, fmt::format("step {}: {} is wrong", step, what));
  }
  Tokens tokens_of(int id, std::uint64_t step) const {
    return {id, static_cast<std::int64_t>(step), kExpertsOfMember * group_.num_ranks()};
  }
  Stream stream() const { return stream_ ? stream_->get() : Stream{}; }

  /// Dispatch, combine and query of the mask. The experts return what they get.
  Status call() {
    const std::int64_t capacity = kNumTokens * group_.num_ranks();
    const TensorView slab(slab_.data(), DType::kBfloat16, {kExpertsOfMember, capacity, kHidden});
    LatencyDispatchInput in;
    in.x = ConstTensorView(x_.data(), DType::kBfloat16, {kNumTokens, kHidden});
    in.topk_idx = ConstTensorView(ids_.data(), DType::kInt64, {kNumTokens, kNumTopk});
    in.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {kNumTokens, kNumTopk});
    LatencyDispatchOutput received;
    received.x = slab;
    LatencyDispatchOptions options;
    options.num_experts = kExpertsOfMember * group_.num_ranks();
    options.max_tokens = kNumTokens;
    options.slab_capacity = capacity;
    Result<Routing> routing = group_.latency_dispatch(in, received, options, stream());
    if (!routing.ok()) return routing.status();
    routing_ = std::move(*routing);
    LatencyCombineInput results;
    results.x = slab;
    LatencyCombineOutput sums;
    sums.x = TensorView(out_.data(), DType::kBfloat16, {kNumTokens, kHidden});
    Status status = group_.latency_combine(routing_, results, sums, stream());
    if (!status.ok() || !masks_) return status;
    return group_.latency_query_mask(TensorView(mask_.data(), DType::kInt32, {group_.num_ranks()}), stream());
  }

  Group& group_;
  int id_;
  bool masks_;
  bool on_gpu_;
  Elements<std::int64_t> ids_{on_gpu_, kNumTokens* kNumTopk};
  Elements<float> weights_{on_gpu_, kNumTokens* kNumTopk};
  Elements<std::uint16_t> x_{on_gpu_, kNumTokens* kHidden};
  Elements<std::uint16_t> slab_{on_gpu_, kExpertsOfMember* kNumTokens* group_.num_ranks() * kHidden};
  Elements<std::uint16_t> out_{on_gpu_, kNumTokens* kHidden};
  Elements<std::int32_t> mask_{on_gpu_, group_.num_ranks()};
  std::optional<OwnedStream> stream_;
  std::optional<CapturedGraph> graph_;
  Routing routing_;
};

/// Keeps one group, and its graph.
class Decoding final : public MemberWork {
 public:
  explicit Decoding(const MemberSettings& settings) : settings_(settings) {
    if (settings.backend == "cuda") enter_device(settings.id() % num_devices(), kPoolBytes);
  }

  Status form_group(Membership& members) override {
    Result<std::shared_ptr<Bootstrap>> bootstrap = members.bootstrap();
    if (!bootstrap.ok()) return bootstrap.status();
    const std::vector<int>& present = members.view().ids;
    return group_ != nullptr ? group_->renew(*bootstrap, present) : create_group(*bootstrap, present);
  }

  Status make_step(const MembershipView& view, std::uint64_t step) override {
    const Result<std::vector<std::int32_t>> mask = decoder_->run(step);
    if (!mask.ok()) return mask.status();
    for (int rank = 0; settings_.masks && rank < group_->num_ranks(); ++rank) {
      const bool is_absent = !std::ranges::binary_search(view.ids, rank);
      if (((*mask)[to_size(rank)] != 0) != is_absent) {
        return Status(ErrorCode::kPeerLost, fmt::format("the mask is [{}]", fmt::join(*mask, ", ")), rank);
      }
    }
    return decoder_->check(step, view.ids);
  }

  NextViewOptions take_loss(const Status& /*status*/) override {
    NextViewOptions options;
    if (group_ == nullptr) return options;
    // A group that could not be renewed is suspended already.
    if (Result<std::vector<int>> silent = group_->suspend(); silent.ok()) options.silent_ids = *silent;
    return options;
  }

 private:
  Status create_group(const std::shared_ptr<Bootstrap>& bootstrap, const std::vector<int>& present) {
    GroupOptions options;
    options.backend = settings_.backend;
    options.timeout_ns = settings_.masks ? kPatienceNs : settings_.deadline_ns;
    options.mask_lost_ranks = settings_.masks;
    options.mask_timeout_ns = settings_.deadline_ns;
    options.num_ranks = settings_.num_first_ranks;
    options.present_ranks = present;
    options.latency_bytes = latency_bytes_required({.backend = settings_.backend,
                                                    .num_ranks = settings_.num_first_ranks,
                                                    .max_tokens = kNumTokens,
                                                    .num_topk = static_cast<int>(kNumTopk),
                                                    .dispatch_row_bytes = kHidden * 2,
                                                    .combine_row_bytes = kHidden * 2})
                                .value();
    Result<std::shared_ptr<Group>> group = Group::create(bootstrap, options);
    if (!group.ok()) return group.status();
    group_ = *group;
    decoder_ = std::make_unique<Decoder>(*group_, settings_.id(), settings_.masks);
    return decoder_->capture();
  }

  const MemberSettings& settings_;
  std::shared_ptr<Group> group_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace
}  // namespace ferry::test

int main(int num_arguments, char** arguments) {
  return ferry::test::run_member({arguments, static_cast<std::size_t>(num_arguments)}, [](const auto& settings) {
    return std::make_unique<ferry::test::Decoding>(settings);
  });
}
