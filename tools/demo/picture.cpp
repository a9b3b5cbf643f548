#include "demo/picture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "common/routing_source.hpp"
#include "report/svg.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

constexpr double kWidth = 1120.0;
constexpr double kMargin = 40.0;
/// Maximum side of the traffic matrix; beyond it cells shrink.
constexpr double kMatrixSide = 440.0;
constexpr double kMaxCell = 72.0;
constexpr double kMatrixLeft = kMargin + 52.0;
constexpr double kPanelsTop = 196.0;
constexpr double kReceivedLeft = 640.0;
constexpr double kLoadHeight = 210.0;
/// Room for the mean's label to the right of the experts.
constexpr double kMeanWidth = 24.0;
/// Numbers of more ranks would not be legible.
constexpr int kMaxNumberedRanks = 16;

constexpr const char* kInk = "#1f2933";
constexpr const char* kFaint = "#66727f";
constexpr const char* kGrid = "#e1e6ea";
constexpr const char* kGood = "#18794e";
constexpr const char* kBad = "#b42318";
constexpr Color kCold = {0.94, 0.96, 0.99};
constexpr Color kWarm = {0.36, 0.61, 0.84};
constexpr Color kHot = {0.03, 0.19, 0.42};
constexpr Color kWhite = {1.0, 1.0, 1.0};

Color heat(double share) { return share < 0.5 ? mix(kCold, kWarm, share * 2.0) : mix(kWarm, kHot, share * 2.0 - 1.0); }

/// Colours of neighbours differ: hues cover the circle once over all ranks, in two lightnesses.
Color color_of(int rank, int num_ranks) {
  return from_hsl(std::fmod(212.0 + 360.0 * rank / num_ranks, 360.0), 0.52, rank % 2 == 0 ? 0.46 : 0.58);
}

std::string short_number(std::int64_t value) {
  constexpr std::int64_t kThousand = 1000;
  return value < 10 * kThousand ? fmt::to_string(value) : fmt::format("{}k", (value + kThousand / 2) / kThousand);
}

/// Distance of about five grid lines up to `most`: 1, 2 or 5 times a power of ten.
double grid_step(double most) {
  const double rough = std::max(most / 5.0, 1.0);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10.0 * power;
}

class Picture {
 public:
  explicit Picture(const DemoReport& report)
      : report_(report),
        plan_(*report.plan),
        num_ranks_(plan_.num_ranks),
        cell_(std::min(kMatrixSide / num_ranks_, kMaxCell)),
        panels_bottom_(kPanelsTop + std::max(cell_ * num_ranks_, bar_pitch() * num_ranks_)),
        load_top_(panels_bottom_ + 130.0),
        svg_(kWidth, load_top_ + kLoadHeight + 76.0, title()) {}

  std::string draw() {
    heading();
    matrix();
    matrix_scale();
    received();
    load();
    return svg_.finish();
  }

 private:
  std::string title() const {
    return plan_.num_nodes == 1 ? fmt::format("Ferry demo: {} ranks on one node", num_ranks_)
                                : "Ferry demo: " + describe_nodes(plan_.num_nodes, plan_.ranks_per_node());
  }
  double bar_pitch() const { return std::clamp(cell_, 3.0, 36.0); }
  bool has_numbers() const { return num_ranks_ <= kMaxNumberedRanks; }
  /// Ranks between two visible labels.
  int label_step() const { return (num_ranks_ + 31) / 32; }
  std::int64_t rows(int from, int to) const {
    return report_.rows_to_rank[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  }
  int node_of(int rank) const { return rank / plan_.ranks_per_node(); }

  void heading() {
    svg_.text(kMargin, 52.0, title(), {.size = 24.0, .bold = true});
    svg_.text(kMargin, 76.0,
              fmt::format("{} at 1/{} size, {} tokens, top {} of {} experts, backend {}", plan_.shape.model,
                          plan_.shape.scale, plan_.num_tokens, plan_.shape.num_topk(), plan_.shape.num_experts,
                          plan_.backend),
              {.size = 13.0, .fill = kFaint});
    const Comparison& comparison = report_.comparison;
    svg_.text(kMargin, 97.0,
              comparison.verified ? fmt::format("verified: {} tokens agree with the dense layer", plan_.num_tokens)
                                  : fmt::format("MISMATCH: {} of {} tokens differ from the dense layer",
                                                comparison.num_bad_tokens, plan_.num_tokens),
              {.size = 13.0, .fill = comparison.verified ? kGood : kBad, .bold = true});
    if (plan_.num_nodes == 1) return;
    const auto sent = [&](Phase phase) {
      return format_bytes(static_cast<double>(wire_of(report_, phase).sent_bytes));
    };
    svg_.text(kMargin, 118.0,
              fmt::format("sent over the network ({}): {} by route, {} by dispatch, {} by combine",
                          report_.ranks.front().wire_names.transport.data(), sent(Phase::kRoute),
                          sent(Phase::kDispatch), sent(Phase::kCombine)),
              {.size = 13.0, .fill = kFaint});
  }

  void matrix() {
    const double side = cell_ * num_ranks_;
    std::int64_t most = 1;
    for (const auto& row : report_.rows_to_rank) most = std::max(most, *std::max_element(row.begin(), row.end()));
    most_rows_ = most;
    svg_.text(kMargin, kPanelsTop - 40.0, "Rows sent, from rank (down) to rank (across)", {.size = 15.0, .bold = true});
    for (int from = 0; from < num_ranks_; ++from) {
      const double y = kPanelsTop + cell_ * from;
      if (from % label_step() == 0) {
        const double size = std::min(12.0, cell_ * label_step() * 0.8);
        svg_.text(kMatrixLeft - 8.0, y + cell_ / 2 + size * 0.35, fmt::to_string(from),
                  {.size = size, .fill = kFaint, .anchor = Anchor::kEnd});
        svg_.text(kMatrixLeft + cell_ * (from + 0.5), kPanelsTop - 8.0, fmt::to_string(from),
                  {.size = size, .fill = kFaint, .anchor = Anchor::kMiddle});
      }
      for (int to = 0; to < num_ranks_; ++to) matrix_cell(from, to);
    }
    if (plan_.num_nodes == 1) {
      svg_.rect({kMatrixLeft, kPanelsTop, side, side}, {.stroke = kInk, .stroke_width = 1.5});
      return;
    }
    const double node_side = cell_ * plan_.ranks_per_node();
    for (int node = 0; node < plan_.num_nodes; ++node) {
      svg_.rect({kMatrixLeft + node_side * node, kPanelsTop + node_side * node, node_side, node_side},
                {.stroke = kInk, .stroke_width = 2.5, .radius = 2.0, .kind = "node"});
      if (node_side < 40.0) continue;
      svg_.text(kMatrixLeft - 34.0, kPanelsTop + node_side * (node + 0.5), fmt::format("node {}", node),
                {.size = 12.0, .anchor = Anchor::kMiddle, .bold = true, .rotation = -90.0});
    }
  }

  void matrix_cell(int from, int to) {
    const double share = static_cast<double>(rows(from, to)) / static_cast<double>(most_rows_);
    const Box box = {kMatrixLeft + cell_ * to, kPanelsTop + cell_ * from, cell_, cell_};
    svg_.rect(box, {.fill = to_hex(heat(share)),
                    .stroke = "#ffffff",
                    .stroke_width = cell_ < 8.0 ? 0.25 : 1.0,
                    .kind = "cell",
                    .hover = fmt::format("rank {} to rank {}: {} rows", from, to, rows(from, to))});
    if (!has_numbers()) return;
    const double size = std::min(14.0, cell_ * 0.36);
    svg_.text(box.x + cell_ / 2, box.y + cell_ / 2 + size * 0.35, short_number(rows(from, to)),
              {.size = size, .fill = share > 0.45 ? "#ffffff" : kInk, .anchor = Anchor::kMiddle});
  }

  /// Legend of the colours and the lines.
  void matrix_scale() {
    constexpr int kNumSteps = 40;
    constexpr double kScaleWidth = 200.0;
    const double y = kPanelsTop + cell_ * num_ranks_ + 18.0;
    for (int step = 0; step < kNumSteps; ++step) {
      svg_.rect({kMatrixLeft + kScaleWidth * step / kNumSteps, y, kScaleWidth / kNumSteps + 0.5, 9.0},
                {.fill = to_hex(heat((step + 0.5) / kNumSteps))});
    }
    svg_.text(kMatrixLeft - 8.0, y + 9.0, "0", {.size = 11.0, .fill = kFaint, .anchor = Anchor::kEnd});
    svg_.text(kMatrixLeft + kScaleWidth + 8.0, y + 9.0, fmt::format("{} rows", most_rows_),
              {.size = 11.0, .fill = kFaint});
    svg_.text(kMargin, y + 30.0,
              plan_.num_nodes == 1 ? "A row is one token for one of its experts. The diagonal stays on its rank."
                                   : "A row is one token for one of its experts. Inside an outline rows move through",
              {.size = 12.0, .fill = kFaint});
    if (plan_.num_nodes == 1) return;
    svg_.text(kMargin, y + 46.0, "shared memory; outside, a token crosses the network once for each node.",
              {.size = 12.0, .fill = kFaint});
  }

  void received() {
    svg_.text(kReceivedLeft, kPanelsTop - 40.0, "Rows received by each rank", {.size = 15.0, .bold = true});
    std::vector<std::pair<std::string, double>> legend = {{"from itself", 0.0}, {"from its node", 0.35}};
    if (plan_.num_nodes > 1) legend.emplace_back("from other nodes", 0.65);
    double legend_x = kReceivedLeft;
    for (const auto& [label, paleness] : legend) {
      svg_.rect({legend_x, kPanelsTop - 27.0, 11.0, 11.0}, {.fill = to_hex(mix(color_of(0, 1), kWhite, paleness))});
      svg_.text(legend_x + 16.0, kPanelsTop - 17.5, label, {.size = 12.0, .fill = kFaint});
      legend_x += 34.0 + 6.6 * static_cast<double>(label.size());
    }
    std::int64_t most = 1;
    for (const RankFigures& figures : report_.ranks) most = std::max(most, figures.num_received_rows);
    const double left = kReceivedLeft + 56.0;
    const double scale = (kWidth - kMargin - 60.0 - left) / static_cast<double>(most);
    const double pitch = bar_pitch();
    const double height = std::min(pitch * 0.76, 20.0);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const double y = kPanelsTop + pitch * rank;
      double x = left;
      for (std::size_t origin = 0; origin < legend.size(); ++origin) {
        const double width = static_cast<double>(received_from(rank, origin)) * scale;
        svg_.rect({x, y, width, height},
                  {.fill = to_hex(mix(color_of(rank, num_ranks_), kWhite, legend[origin].second)), .kind = "received"});
        x += width;
      }
      const double size = std::min(12.0, pitch * label_step() * 0.8);
      if (rank % label_step() != 0) continue;
      const double baseline = y + height / 2 + size * 0.35;
      svg_.text(left - 8.0, baseline, fmt::format("rank {}", rank),
                {.size = size, .fill = kFaint, .anchor = Anchor::kEnd});
      svg_.text(x + 6.0, baseline, fmt::to_string(report_.ranks[static_cast<std::size_t>(rank)].num_received_rows),
                {.size = size});
    }
  }

  /// `origin` 0: the rank itself, 1: others of its node, 2: other nodes.
  std::int64_t received_from(int rank, std::size_t origin) const {
    std::int64_t count = 0;
    for (int from = 0; from < num_ranks_; ++from) {
      const std::size_t theirs = from == rank ? 0 : node_of(from) == node_of(rank) ? 1 : 2;
      if (theirs == origin) count += rows(from, rank);
    }
    return count;
  }

  void load() {
    const auto num_experts = static_cast<std::int64_t>(report_.expert_rows.size());
    const std::int64_t total = std::accumulate(report_.expert_rows.begin(), report_.expert_rows.end(), std::int64_t{0});
    const double mean = static_cast<double>(total) / static_cast<double>(num_experts);
    const auto most = static_cast<double>(*std::max_element(report_.expert_rows.begin(), report_.expert_rows.end()));
    const double left = kMatrixLeft;
    const double width = kWidth - kMargin - left - kMeanWidth;
    const double bottom = load_top_ + kLoadHeight;
    const double scale = kLoadHeight / std::max(most, 1.0);
    svg_.text(kMargin, load_top_ - 30.0, "Expert load: rows of each expert, coloured by the rank that owns it",
              {.size = 15.0, .bold = true});
    const double step = grid_step(most);
    for (double value = 0.0; value <= most; value += step) {
      const double y = bottom - value * scale;
      svg_.line(left, y, left + width, y, kGrid);
      svg_.text(left - 8.0, y + 4.0, fmt::format("{:.0f}", value),
                {.size = 11.0, .fill = kFaint, .anchor = Anchor::kEnd});
    }
    const double pitch = width / static_cast<double>(num_experts);
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::int64_t count = report_.expert_rows[static_cast<std::size_t>(expert)];
      const auto owner = static_cast<int>(owner_of(expert, num_experts, num_ranks_));
      const double height = static_cast<double>(count) * scale;
      svg_.rect(
          {left + pitch * static_cast<double>(expert), bottom - height, pitch * (pitch < 2.0 ? 1.0 : 0.84), height},
          {.fill = to_hex(color_of(owner, num_ranks_)),
           .kind = "bar",
           .hover = fmt::format("expert {} on rank {}: {} rows", expert, owner, count)});
    }
    svg_.line(left, bottom - mean * scale, left + width, bottom - mean * scale, kInk, "5 4");
    svg_.text(left + width + 6.0, bottom - mean * scale - 2.0, "mean", {.size = 11.0, .bold = true});
    svg_.text(left + width + 6.0, bottom - mean * scale + 10.0, fmt::format("{:.1f}", mean),
              {.size = 11.0, .bold = true});
    owners(left, pitch, bottom);
  }

  /// Owners of the experts, below the bars.
  void owners(double left, double pitch, double bottom) {
    const auto num_experts = static_cast<std::int64_t>(report_.expert_rows.size());
    const auto edge = [&](int rank) { return left + pitch * static_cast<double>(num_experts * rank / num_ranks_); };
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const double width = edge(rank + 1) - edge(rank);
      svg_.rect({edge(rank), bottom + 4.0, width, 5.0}, {.fill = to_hex(color_of(rank, num_ranks_))});
      if (width == 0.0 || rank % label_step() != 0) continue;
      svg_.text(edge(rank) + width / 2, bottom + 24.0,
                has_numbers() ? fmt::format("rank {}", rank) : fmt::to_string(rank),
                {.size = 11.0, .fill = kFaint, .anchor = Anchor::kMiddle});
    }
    if (plan_.num_nodes == 1) return;
    for (int node = 0; node < plan_.num_nodes; ++node) {
      const double begin = edge(node * plan_.ranks_per_node()) + 2.0;
      const double end = edge((node + 1) * plan_.ranks_per_node()) - 2.0;
      if (end - begin < 40.0) continue;
      svg_.line(begin, bottom + 34.0, end, bottom + 34.0, kInk);
      svg_.text((begin + end) / 2, bottom + 50.0, fmt::format("node {}", node),
                {.size = 12.0, .anchor = Anchor::kMiddle, .bold = true});
    }
  }

  const DemoReport& report_;
  const DemoPlan& plan_;
  int num_ranks_;
  double cell_;
  double panels_bottom_;
  double load_top_;
  std::int64_t most_rows_ = 1;
  Svg svg_;
};

}  // namespace

std::string draw_picture(const DemoReport& report) { return Picture(report).draw(); }

}  // namespace ferry::tools
