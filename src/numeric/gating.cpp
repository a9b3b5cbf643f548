#include "numeric/gating.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <vector>

namespace ferry::numeric {
namespace {

// The work on a row is inlined into one function per instruction set, which determines the width of its loops.

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A selection key and, below it, the complement of the expert's id: unique, and the largest is the expert to choose.
using Candidate = std::int64_t;
constexpr Candidate kClosed = std::numeric_limits<Candidate>::min();
/// Candidates per block, whose best is kept, so that a choice compares E / 16 + 16 of them.
constexpr std::size_t kBlock = 16;

[[gnu::always_inline]] inline Candidate make_candidate(std::uint32_t key, std::size_t expert) {
  const auto high = static_cast<Candidate>(static_cast<std::int32_t>(key ^ 0x80000000U)) * (Candidate{1} << 32);
  return high + static_cast<Candidate>(~static_cast<std::uint32_t>(expert));
}
[[gnu::always_inline]] inline std::size_t expert_of(Candidate candidate) {
  return ~static_cast<std::uint32_t>(candidate);
}
[[gnu::always_inline]] inline std::uint32_t key_of(Candidate candidate) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(candidate) >> 32) ^ 0x80000000U;
}

[[gnu::always_inline]] inline Candidate largest_of(const Candidate* candidates, std::size_t count) {
  Candidate largest = kClosed;
  for (std::size_t i = 0; i < count; ++i) largest = candidates[i] > largest ? candidates[i] : largest;
  return largest;
}

[[gnu::always_inline]] inline float largest_of(const float* values, std::size_t count) {
  float largest = -kInfinity;
  for (std::size_t i = 0; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

[[gnu::always_inline]] inline float sum_of_runs(std::array<float, kGatingRuns>& runs) {
  for (std::size_t distance = kGatingRuns / 2; distance > 0; distance /= 2) {
    for (std::size_t i = 0; i < distance; ++i) runs[i] += runs[i + distance];
  }
  return runs[0];
}

/// Chooses the experts of one token after another; reuses its scratch memory.
class Chooser {
 public:
  explicit Chooser(const GatingParams& params)
      : params_(params),
        options_(params.options),
        num_experts_(static_cast<std::size_t>(params.num_experts)),
        num_blocks_((num_experts_ + kBlock - 1) / kBlock),
        group_size_(num_experts_ / static_cast<std::size_t>(options_.num_groups)),
        by_logit_(selects_by_logit(options_, params.bias != nullptr)),
        row_(num_experts_),
        compared_(num_experts_),
        scores_(num_experts_),
        candidates_(num_blocks_ * kBlock, kClosed),
        block_best_(num_blocks_),
        groups_(is_group_limited(options_) ? static_cast<std::size_t>(options_.num_groups) : 0),
        counts_(options_.capacity > 0 ? num_experts_ : 0) {}

  [[gnu::always_inline]] inline void choose_all() {
    for (std::int64_t token = 0; token < params_.num_tokens; ++token) {
      load(token);
      compare(token);
      choose(false);
      if (options_.capacity > 0) limit();
      weigh();
      store(token);
    }
  }

 private:
  [[gnu::always_inline]] inline void load(std::int64_t token) {
    const std::int64_t first = token * params_.num_experts;
    if (!params_.is_bfloat16) {
      logits_ = static_cast<const float*>(params_.logits) + first;
      return;
    }
    const std::uint16_t* from = static_cast<const std::uint16_t*>(params_.logits) + first;
    for (std::size_t i = 0; i < num_experts_; ++i) row_[i] = float_from_bfloat16(from[i]);
    logits_ = row_.data();
  }

  /// Sets the keys of all experts.
  [[gnu::always_inline]] inline void compare(std::int64_t token) {
    const float* logits = logits_;
    if (options_.noise > 0) {
      for (std::size_t i = 0; i < num_experts_; ++i) {
        compared_[i] = noisy(logits_[i], options_, token, static_cast<int>(i));
      }
      logits = compared_.data();
    }
    float* const scores = scores_.data();
    if (!by_logit_) score(logits, scores);
    const float* values = by_logit_ ? logits : scores;
    if (params_.bias != nullptr) {
      for (std::size_t i = 0; i < num_experts_; ++i) scores[i] = values[i] + params_.bias[i];
      values = scores;
    }
    keys_.resize(num_experts_);
    std::uint32_t* const keys = keys_.data();
    for (std::size_t i = 0; i < num_experts_; ++i) keys[i] = selection_key(values[i], logits[i]);
  }

  [[gnu::always_inline]] inline void score(const float* logits, float* scores) {
    if (options_.score == GatingScore::kSigmoid) {
      for (std::size_t i = 0; i < num_experts_; ++i) scores[i] = sigmoid(logits[i]);
      return;
    }
    const float sum = sum_of_row(logits, largest_of(logits, num_experts_), scores);
    for (std::size_t i = 0; i < num_experts_; ++i) scores[i] = scores[i] / sum;
  }

  /// Sum of the exponentials of a row, which are left in `exponentials`; 1 if all are zero.
  [[gnu::always_inline]] inline float sum_of_row(const float* logits, float largest, float* exponentials) {
    for (std::size_t i = 0; i < num_experts_; ++i) exponentials[i] = relative_exponential(logits[i], largest);
    const auto run_length = static_cast<std::size_t>(gating_run_length(params_.num_experts));
    std::array<float, kGatingRuns> runs{};
    for (std::size_t run = 0; run < kGatingRuns; ++run) {
      const std::size_t end = std::min((run + 1) * run_length, num_experts_);
      for (std::size_t i = run * run_length; i < end; ++i) runs[run] += exponentials[i];
    }
    const float sum = sum_of_runs(runs);
    return sum == 0 ? 1.0F : sum;
  }

  /// Fills `chosen_`, best first. `only_open`: skips full experts.
  [[gnu::always_inline]] inline void choose(bool only_open) {
    Candidate* const candidates = candidates_.data();
    for (std::size_t i = 0; i < num_experts_; ++i) candidates[i] = make_candidate(keys_[i], i);
    if (only_open) {
      for (std::size_t i = 0; i < num_experts_; ++i) {
        if (counts_[i] >= options_.capacity) candidates[i] = kClosed;
      }
    }
    if (!groups_.empty()) close_groups();
    for (std::size_t block = 0; block < num_blocks_; ++block) {
      block_best_[block] = largest_of(candidates + block * kBlock, kBlock);
    }
    for (std::size_t k = 0; k < static_cast<std::size_t>(options_.num_topk); ++k) {
      const Candidate best = largest_of(block_best_.data(), num_blocks_);
      if (best == kClosed) {
        chosen_[k] = -1;
        continue;
      }
      const std::size_t expert = expert_of(best);
      chosen_[k] = static_cast<std::int32_t>(expert);
      candidates[expert] = kClosed;
      block_best_[expert / kBlock] = largest_of(candidates + expert / kBlock * kBlock, kBlock);
    }
  }

  [[gnu::always_inline]] inline void close_groups() {
    const bool sums = options_.group_score == GatingGroupScore::kBestTwo;
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      const Candidate* const members = candidates_.data() + group * group_size_;
      const Candidate best = largest_of(members, group_size_);
      Candidate second = kClosed;
      for (std::size_t i = 0; sums && i < group_size_; ++i) {
        const Candidate other = members[i] == best ? kClosed : members[i];
        second = other > second ? other : second;
      }
      const std::uint32_t key = group_key(key_of(best), key_of(second), sums, group_size_ > 1);
      groups_[group] = make_candidate(key, group);
    }
    order_ = groups_;
    const auto kept = order_.begin() + options_.num_selected_groups - 1;
    std::nth_element(order_.begin(), kept, order_.end(), [](Candidate a, Candidate b) { return a > b; });
    const Candidate last = *kept;
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      if (groups_[group] >= last) continue;
      Candidate* const members = candidates_.data() + group * group_size_;
      for (std::size_t i = 0; i < group_size_; ++i) members[i] = kClosed;
    }
  }

  /// Enforces the capacity, and counts the chosen experts.
  [[gnu::always_inline]] inline void limit() {
    const auto num_topk = static_cast<std::size_t>(options_.num_topk);
    const auto is_full = [this](std::int32_t expert) {
      return expert >= 0 && counts_[static_cast<std::size_t>(expert)] >= options_.capacity;
    };
    kept_.fill(true);
    if (std::any_of(chosen_.begin(), chosen_.begin() + options_.num_topk, is_full)) {
      if (options_.overflow == GatingOverflow::kRechoose) {
        choose(true);
      } else {
        for (std::size_t k = 0; k < num_topk; ++k) kept_[k] = !is_full(chosen_[k]);
      }
    }
    for (std::size_t k = 0; k < num_topk; ++k) {
      if (kept_[k] && chosen_[k] >= 0) ++counts_[static_cast<std::size_t>(chosen_[k])];
    }
  }

  /// Weighs the chosen experts by the original logits, without noise.
  [[gnu::always_inline]] inline void weigh() {
    const auto num_topk = static_cast<std::size_t>(options_.num_topk);
    std::array<float, kGatingRuns> chosen_logits;
    for (std::size_t k = 0; k < num_topk; ++k) {
      chosen_logits[k] = chosen_[k] < 0 ? -kInfinity : logits_[static_cast<std::size_t>(chosen_[k])];
    }
    const bool cancels = sum_of_row_cancels(options_);
    float largest = 0;
    float row_sum = 1;
    if (cancels) {
      largest = largest_of(chosen_logits.data(), num_topk);
    } else if (options_.score == GatingScore::kSoftmax) {
      largest = largest_of(logits_, num_experts_);
      row_sum = sum_of_row(logits_, largest, scores_.data());
    }
    for (std::size_t k = 0; k < num_topk; ++k) {
      const float logit = chosen_logits[k];
      if (options_.score == GatingScore::kSigmoid) {
        weights_[k] = sigmoid(logit);
      } else {
        weights_[k] = relative_exponential(logit, largest) / row_sum;
      }
      if (chosen_[k] < 0) weights_[k] = 0;
    }
    std::array<float, kGatingRuns> places{};
    std::copy_n(weights_.begin(), num_topk, places.begin());
    const float sum = sum_of_runs(places);
    for (std::size_t k = 0; k < num_topk; ++k) weights_[k] = final_weight(weights_[k], sum, options_);
  }

  [[gnu::always_inline]] inline void store(std::int64_t token) {
    for (std::int64_t k = 0; k < options_.num_topk; ++k) {
      const auto at = static_cast<std::size_t>(k);
      const bool kept = options_.capacity <= 0 || kept_[at];
      const std::int32_t id = kept ? chosen_[at] : -1;
      const std::int64_t offset = token * params_.ids_row_stride + k * params_.ids_column_stride;
      if (params_.wide_ids) {
        static_cast<std::int64_t*>(params_.ids)[offset] = id;
      } else {
        static_cast<std::int32_t*>(params_.ids)[offset] = id;
      }
      params_.weights[token * params_.weights_row_stride + k * params_.weights_column_stride] =
          kept ? weights_[at] : 0.0F;
    }
  }

  const GatingParams& params_;
  const GatingOptions& options_;
  std::size_t num_experts_;
  std::size_t num_blocks_;
  std::size_t group_size_;
  bool by_logit_;
  const float* logits_ = nullptr;  ///< logits of the current token
  std::vector<float> row_;
  std::vector<float> compared_;
  std::vector<float> scores_;
  std::vector<std::uint32_t> keys_;
  std::vector<Candidate> candidates_;
  std::vector<Candidate> block_best_;
  std::vector<Candidate> groups_;
  std::vector<Candidate> order_;
  std::vector<std::int64_t> counts_;  ///< tokens that each expert has taken
  std::array<std::int32_t, kGatingRuns> chosen_{};
  std::array<bool, kGatingRuns> kept_{};
  std::array<float, kGatingRuns> weights_{};
};

void choose_generic(const GatingParams& params) { Chooser(params).choose_all(); }

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void choose_avx2(const GatingParams& params) { Chooser(params).choose_all(); }

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma")]] void choose_avx512(const GatingParams& params) {
  Chooser(params).choose_all();
}
#endif

/// First of gating_variants that this processor supports.
const GatingVariant& best_variant() {
  const std::span<const GatingVariant> variants = gating_variants();
  return *std::find_if(variants.begin(), variants.end(), [](const GatingVariant& one) { return one.available; });
}

}  // namespace

std::span<const GatingVariant> gating_variants() {
  static const GatingVariant variants[] = {
#if defined(__x86_64__)
    {"avx512",
     __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("fma") != 0,
     choose_avx512},
    {"avx2", __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0, choose_avx2},
#endif
    {"generic", true, choose_generic},
  };
  return variants;
}

void choose_experts(const GatingParams& params) {
  static const GatingVariant& variant = best_variant();
  variant.choose(params);
}

}  // namespace ferry::numeric
