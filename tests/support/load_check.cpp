#include "support/load_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace ferry::test {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"logical", "physical", "received", "homeless"};
/// Value of a counter before a call; an i32 counter is about to wrap.
constexpr std::int64_t kStart = 0x7FFFFFFE;

Bytes encode(DType dtype, const std::vector<std::int64_t>& counts, int num_calls) {
  Bytes bytes(counts.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto value = static_cast<std::uint64_t>(kStart + counts[i] * num_calls);
    std::memcpy(bytes.data() + i * size_bytes(dtype), &value, size_bytes(dtype));  // an i32 takes the low half
  }
  return bytes;
}

/// Whether an entry of a rank names an expert without a home.
bool is_homeless(const PreparedCase& prepared, std::size_t rank, std::size_t entry) {
  const Placement& placement = prepared.given.options.placement;
  const std::int64_t expert = prepared.given.ranks[rank].topk_idx[entry];
  const auto& homes = placement.physical_to_logical;
  return placement.present() && expert >= 0 && std::find(homes.begin(), homes.end(), expert) == homes.end();
}

std::int64_t num_homeless(const PreparedCase& prepared, std::size_t rank) {
  std::int64_t count = 0;
  for (std::size_t entry = 0; entry < prepared.given.ranks[rank].topk_idx.size(); ++entry) {
    if (is_homeless(prepared, rank, entry)) ++count;
  }
  return count;
}

/// Tokens that go to each logical expert: those that name it, if it has a home.
std::vector<std::int64_t> logical_counts(const PreparedCase& prepared, std::size_t rank) {
  oracle::World placed = prepared.given;
  for (std::size_t entry = 0; entry < placed.ranks[rank].topk_idx.size(); ++entry) {
    if (is_homeless(prepared, rank, entry)) placed.ranks[rank].topk_idx[entry] = -1;
  }
  return oracle::count_rows(placed, rank);
}

}  // namespace

CounterTensors::CounterTensors(RankContext& context, Group& group, const PreparedCase& prepared)
    : on_device_(uses_device(group)) {
  const auto rank = static_cast<std::size_t>(context.rank());
  const auto& received = prepared.routings[rank].num_rows_per_local_expert;
  counters_[0].counts = logical_counts(prepared, rank);
  counters_[1].counts = oracle::count_rows(prepared.world, rank);
  counters_[2].counts.assign(received.begin(), received.end());
  counters_[3].counts = {num_homeless(prepared, rank)};
  const std::uint64_t seed = prepared.spec.world.seed;
  for (std::size_t i = 0; i < counters_.size(); ++i) {
    // The last one exists wherever the first does.
    if (((seed + rank) >> i % 3 & 1U) == 0) continue;
    Counter& counter = counters_[i];
    counter.dtype = (seed >> (3 + i % 3) & 1U) == 0 ? DType::kInt64 : DType::kInt32;
    const Bytes start = encode(counter.dtype, counter.counts, 0);
    counter.memory = PlainMemory(on_device_, start.size());
    write_memory(on_device_, counter.memory.data(), start.data(), start.size());
    counter.view = TensorView(counter.memory.data(), counter.dtype, {static_cast<std::int64_t>(counter.counts.size())});
  }
  views_ = {counters_[0].view, counters_[1].view, counters_[2].view, counters_[3].view};
}

void CounterTensors::expect_counted(RankContext& context, const std::string& where, int num_calls) const {
  for (std::size_t i = 0; i < counters_.size(); ++i) {
    const Counter& counter = counters_[i];
    if (!counter.view.present() || counter.counts.empty()) continue;
    const Bytes expected = encode(counter.dtype, counter.counts, num_calls);
    context.expect(read_memory(on_device_, counter.view.data, expected.size()) == expected,
                   fmt::format("{}counter {} has wrong values", where, kNames[i]));
  }
}

}  // namespace ferry::test
