#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "balance/arguments.hpp"
#include "ferry/balance.hpp"
#include "numeric/strided.hpp"
#include "numeric/without_exceptions.hpp"

namespace ferry {
namespace {

constexpr std::string_view kCall = "plan_moves";
/// Marks a place without a copy to it, or no staging place.
constexpr std::int32_t kNone = -1;

/// Plans one layer after another; counts of copies sent by ranks carry over.
class Planner {
 public:
  Planner(const MovePlanOptions& options, std::size_t num_physical)
      : options_(options),
        num_physical_(num_physical),
        places_per_rank_(num_physical / static_cast<std::size_t>(options.num_ranks)),
        ranks_per_node_(options.num_ranks / options.num_nodes),
        given_(static_cast<std::size_t>(options.num_ranks), 0),
        staged_(given_.size(), 0) {
    plan_.num_staging.assign(given_.size(), 0);
    plan_.wave_begin.assign(1, 0);
  }

  Status add_layer(std::int32_t layer, const std::int32_t* previous, const std::int32_t* next) {
    layer_ = layer;
    previous_ = previous;
    next_ = next;
    std::fill(staged_.begin(), staged_.end(), 0);
    if (Status status = choose_sources(); !status) return status;
    order();
    append_layer();
    return {};
  }

  MovePlan take() { return std::move(plan_); }

 private:
  std::int32_t rank_of(std::size_t place) const { return static_cast<std::int32_t>(place / places_per_rank_); }

  /// Fills source_[place]: the place to copy from, kNone if nothing arrives.
  Status choose_sources() {
    source_.assign(num_physical_, kNone);
    num_readers_.assign(num_physical_, 0);
    std::vector<std::vector<std::size_t>> places_of(static_cast<std::size_t>(options_.num_experts));
    for (std::size_t place = 0; place < num_physical_; ++place) {
      if (previous_[place] >= 0) places_of[static_cast<std::size_t>(previous_[place])].push_back(place);
    }
    for (std::size_t place = 0; place < num_physical_; ++place) {
      if (next_[place] < 0 || next_[place] == previous_[place]) continue;
      const auto& candidates = places_of[static_cast<std::size_t>(next_[place])];
      if (candidates.empty())
        return numeric::bad_argument({kCall, fmt::format("next[{}, {}]", layer_, place)}, std::to_string(next_[place]),
                                     "an expert that previous has", "load new experts without this plan");
      const std::size_t source = *std::min_element(candidates.begin(), candidates.end(), [&](auto a, auto b) {
        return source_cost(a, place) < source_cost(b, place);
      });
      source_[place] = static_cast<std::int32_t>(source);
      ++num_readers_[source];
      if (rank_of(source) != rank_of(place)) ++given_[static_cast<std::size_t>(rank_of(source))];
    }
    return {};
  }

  /// Cost of a source: nearest first, then sources that are not overwritten, then the rank that has sent least.
  std::tuple<int, bool, std::int64_t, std::size_t> source_cost(std::size_t source, std::size_t place) const {
    const int from = rank_of(source);
    const int to = rank_of(place);
    const int distance = from == to ? 0 : from / ranks_per_node_ == to / ranks_per_node_ ? 1 : 2;
    const bool overwritten = next_[source] >= 0 && next_[source] != previous_[source];
    return {distance, overwritten, given_[static_cast<std::size_t>(from)], source};
  }

  /// Orders the copies. A place may be written once all copies from it are done. Every place is copied from at most one
  /// other, so when every place left has a reader, the places form circles; one place of each circle is staged.
  void order() {
    wave_of_.assign(num_physical_, 0);
    std::vector<std::size_t> ready;
    for (std::size_t place = 0; place < num_physical_; ++place) {
      if (source_[place] != kNone && num_readers_[place] == 0) ready.push_back(place);
    }
    finish(ready);
    for (std::size_t place = 0; place < num_physical_; ++place) {
      if (source_[place] == kNone) continue;
      // The remaining reader, the place before it in the circle, reads the staging place instead.
      const auto rank = static_cast<std::size_t>(rank_of(place));
      const std::int32_t staging = staged_[rank]++;
      plan_.num_staging[rank] = std::max(plan_.num_staging[rank], staged_[rank]);
      copies_.push_back({0,
                         {layer_, previous_[place], static_cast<std::int32_t>(place), staging, rank_of(place),
                          rank_of(place), false, true}});
      std::size_t reader = place;
      while (static_cast<std::size_t>(source_[reader]) != place) reader = static_cast<std::size_t>(source_[reader]);
      staging_ = staging;
      staged_reader_ = reader;
      --num_readers_[place];
      wave_of_[place] = std::max(wave_of_[place], 1);
      finish({place});
    }
  }

  /// Copies to places without readers, then to places that lose their last reader thereby.
  void finish(std::vector<std::size_t> ready) {
    while (!ready.empty()) {
      const std::size_t place = ready.back();
      ready.pop_back();
      const auto source = static_cast<std::size_t>(source_[place]);
      const bool staged = staging_ != kNone && place == staged_reader_;
      const std::int32_t wave = wave_of_[place];
      copies_.push_back({wave,
                         {layer_, next_[place], staged ? staging_ : static_cast<std::int32_t>(source),
                          static_cast<std::int32_t>(place), rank_of(source), rank_of(place), staged, false}});
      source_[place] = kNone;
      if (staged) {
        staging_ = kNone;
        continue;
      }
      wave_of_[source] = std::max(wave_of_[source], wave + 1);
      if (--num_readers_[source] == 0 && source_[source] != kNone) ready.push_back(source);
    }
  }

  /// Appends the layer's copies by wave.
  void append_layer() {
    std::stable_sort(copies_.begin(), copies_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      const ExpertCopy& copy = copies_[i].second;
      plan_.copies.push_back(copy);
      if (i + 1 == copies_.size() || copies_[i + 1].first != copies_[i].first) {
        plan_.wave_begin.push_back(static_cast<std::int64_t>(plan_.copies.size()));
      }
      const bool between_nodes = copy.from_rank / ranks_per_node_ != copy.to_rank / ranks_per_node_;
      plan_.num_between_nodes += between_nodes ? 1 : 0;
      ++(copy.local() ? plan_.num_local : plan_.num_remote);
    }
    copies_.clear();
  }

  const MovePlanOptions& options_;
  const std::size_t num_physical_;
  const std::size_t places_per_rank_;
  const int ranks_per_node_;
  std::vector<std::int64_t> given_;   ///< copies to other ranks, by rank
  std::vector<std::int32_t> staged_;  ///< staging places in use in this layer, by rank
  std::int32_t layer_ = 0;
  const std::int32_t* previous_ = nullptr;
  const std::int32_t* next_ = nullptr;
  std::vector<std::int32_t> source_;
  std::vector<std::int32_t> num_readers_;
  std::vector<std::int32_t> wave_of_;  ///< earliest wave in which a place may be written
  std::int32_t staging_ = kNone;
  std::size_t staged_reader_ = 0;
  std::vector<std::pair<std::int32_t, ExpertCopy>> copies_;
  MovePlan plan_;
};

Result<MovePlan> plan_layers(const ConstTensorView& previous, const ConstTensorView& next,
                             const MovePlanOptions& options) {
  if (options.num_experts < 1 || options.num_experts > kMaxBalanceExperts)
    return numeric::bad_argument({kCall, "options.num_experts"}, std::to_string(options.num_experts),
                                 fmt::format("1 to {}", kMaxBalanceExperts), "give the number of experts of a layer");
  auto before = balancing::read_placement(previous, {kCall, "previous", -1, -1, options.num_experts});
  if (!before) return before.status();
  const std::int64_t num_physical = previous.extent(1);
  auto after = balancing::read_placement(next, {kCall, "next", previous.extent(0), num_physical, options.num_experts});
  if (!after) return after.status();
  Status status = balancing::check_ranks(kCall, num_physical, options.num_ranks, options.num_nodes);
  if (!status) return status;

  status = balancing::check_entries({kCall, "options.num_experts"}, previous.extent(0), options.num_experts);
  if (!status) return status;

  Planner planner(options, static_cast<std::size_t>(num_physical));
  for (std::int64_t layer = 0; layer < previous.extent(0); ++layer) {
    const std::int64_t first = layer * num_physical;
    status = planner.add_layer(static_cast<std::int32_t>(layer), before->data() + first, after->data() + first);
    if (!status) return status;
  }
  return planner.take();
}

}  // namespace

Result<MovePlan> plan_moves(const ConstTensorView& previous, const ConstTensorView& next,
                            const MovePlanOptions& options) {
  return numeric::without_exceptions(kCall, [&] { return plan_layers(previous, next, options); });
}

}  // namespace ferry
