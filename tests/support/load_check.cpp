#include "support/load_check.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string_view>

namespace ferry::test {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"logical", "physical", "received"};
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

}  // namespace

CounterTensors::CounterTensors(RankContext& context, Group& group, const PreparedCase& prepared)
    : on_device_(uses_device(group)) {
  const auto rank = static_cast<std::size_t>(context.rank());
  const auto& received = prepared.routings[rank].num_rows_per_local_expert;
  counters_[0].counts = oracle::count_rows(prepared.given, rank);
  counters_[1].counts = oracle::count_rows(prepared.world, rank);
  counters_[2].counts.assign(received.begin(), received.end());
  const std::uint64_t seed = prepared.spec.world.seed;
  for (std::size_t i = 0; i < counters_.size(); ++i) {
    if (((seed + rank) >> i & 1U) == 0) continue;
    Counter& counter = counters_[i];
    counter.dtype = (seed >> (3 + i) & 1U) == 0 ? DType::kInt64 : DType::kInt32;
    const Bytes start = encode(counter.dtype, counter.counts, 0);
    counter.memory = PlainMemory(on_device_, start.size());
    write_memory(on_device_, counter.memory.data(), start.data(), start.size());
    counter.view = TensorView(counter.memory.data(), counter.dtype, {static_cast<std::int64_t>(counter.counts.size())});
  }
  views_ = {counters_[0].view, counters_[1].view, counters_[2].view};
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
