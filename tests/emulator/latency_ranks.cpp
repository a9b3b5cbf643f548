#include "emulator/latency_ranks.hpp"

#include <algorithm>
#include <cstring>

namespace ferry::emulator {
namespace {

constexpr std::size_t kGuardBytes = 256;

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes, std::byte fill)
    : memory_(bytes + kGuardBytes + kAlignment, kPattern), bytes_(bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
  data_ = memory_.data() + (kAlignment - address % kAlignment) % kAlignment;
  std::fill_n(data_, bytes, fill);
}

bool DeviceMemory::is_guarded() const {
  if (data_ == nullptr) return true;
  return std::all_of(data_ + bytes_, data_ + bytes_ + kGuardBytes, [](std::byte byte) { return byte == kPattern; });
}

LatencyRanks::LatencyRanks(const Options& options)
    : options_(options), machine_(options.seed), reports_(static_cast<std::size_t>(options.num_ranks)) {
  const std::size_t control = cuda::Control::at(nullptr, static_cast<std::size_t>(options.num_ranks)).size_bytes;
  const std::size_t offset =
      (control + DeviceMemory::kAlignment - 1) / DeviceMemory::kAlignment * DeviceMemory::kAlignment;
  layout_ = cuda::LatencyLayout::of(static_cast<std::int64_t>(offset), options.latency_bytes, options.num_ranks);
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    streams_.push_back(machine_.add_stream());
    arenas_.emplace_back(offset + static_cast<std::size_t>(options.latency_bytes), std::byte{0});
    std::size_t mask_bytes = 0;
    cuda::MaskParams::at(nullptr, static_cast<std::size_t>(options.num_ranks), mask_bytes);
    masks_.emplace_back(masks() ? mask_bytes : 0, std::byte{0});
    wait_times_.emplace_back(static_cast<std::size_t>(options.num_ranks), 0);
  }
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    age_words(rank);
    grant_first_sets(rank);
  }
}

void LatencyRanks::age_words(int rank) {
  if (options_.calls_before == 0) return;
  // The sets have been used and their words cleared, so no word is from a call long ago.
  const auto age = [](std::byte* begin, std::int64_t bytes, std::uint64_t number) {
    auto* words = reinterpret_cast<std::uint64_t*>(begin);
    std::fill_n(words, bytes / cuda::LatencyLayout::kWordBytes, number << 32);
  };
  const std::uint64_t number = options_.calls_before + options_.words_ahead;
  std::byte* const base = arenas_[static_cast<std::size_t>(rank)].data() + layout_.offset;
  age(base + layout_.control.headers, layout_.control.counts - layout_.control.headers, options_.calls_before);
  age(base + layout_.control.counts, layout_.control.local - layout_.control.counts, number);
  std::byte* const sets = base + layout_.control.size_bytes;
  for (int set = 0; set < cuda::kLatencyKinds * cuda::kSets; ++set) {
    age(sets + set * layout_.set_bytes, layout_.words_bytes, number);
  }
  age(base + layout_.row_words, cuda::kSets * options_.num_ranks * layout_.row_words_bytes, number);
}

cuda::RankParams LatencyRanks::params(int rank) {
  cuda::RankParams params;
  params.rank = rank;
  params.num_ranks = options_.num_ranks;
  for (std::size_t peer = 0; peer < arenas_.size(); ++peer) params.peer_bases[peer] = arenas_[peer].data();
  params.control =
      cuda::Control::at(arenas_[static_cast<std::size_t>(rank)].data(), static_cast<std::size_t>(options_.num_ranks));
  params.report = &report(rank);
  params.timeout_ns = kTimeoutNs;
  return params;
}

cuda::WaitTimesParams LatencyRanks::wait_times_params(int rank) {
  cuda::WaitTimesParams times;
  times.local = params(rank).control.local;
  times.ranks_per_node = options_.num_ranks;
  times.rank_in_node = rank;
  times.times_ns = wait_times_[static_cast<std::size_t>(rank)].data();
  return times;
}

cuda::MaskParams LatencyRanks::mask(int rank) const {
  std::size_t size_bytes = 0;
  cuda::MaskParams mask = cuda::MaskParams::at(masks_[static_cast<std::size_t>(rank)].data(),
                                               static_cast<std::size_t>(options_.num_ranks), size_bytes);
  mask.timeout_ns = options_.mask_timeout_ns;
  return mask;
}

void LatencyRanks::update_mask(int rank, const std::vector<int>& others, bool masked) {
  for (const int other : others) {
    cuda::MaskUpdateParams update;
    update.call.ranks = params(rank);
    update.call.layout = layout_;
    update.mask = mask(rank);
    update.first_rank = other;
    update.end_rank = other + 1;
    update.masked = masked;
    cuda::launch_mask_update(update, stream(rank));
  }
}

void LatencyRanks::query_mask(int rank, std::int32_t* out) {
  cuda::launch_mask_query({mask(rank), options_.num_ranks, out}, stream(rank));
}

void LatencyRanks::delay(int rank, std::uint64_t time_ns) {
  machine_.launch(stream(rank), {}, [time_ns] {
    const std::uint64_t start_ns = now_ns();
    while (now_ns() - start_ns < time_ns) poll();
  });
}

void LatencyRanks::refuse(const cuda::LatencyRefusalParams& params) {
  const int rank = params.call.ranks.rank;
  if (masks()) {
    cuda::launch_masked_refusal({params, mask(rank)}, stream(rank));
  } else {
    cuda::launch_latency_refusal(params, stream(rank));
  }
}

void LatencyRanks::put_header(int rank, cuda::LatencyKind kind, int source, std::uint64_t number, int set,
                              const cuda::LatencyHeader& header) {
  std::byte* const base = arenas_[static_cast<std::size_t>(rank)].data() + layout_.offset;
  const int index = (static_cast<int>(kind) * cuda::kHeaderSets + set) * options_.num_ranks + source;
  auto* words = reinterpret_cast<std::uint64_t*>(base + layout_.control.headers) +
                static_cast<std::size_t>(index) * cuda::kLatencyHeaderSlotWords;
  const auto* payload = reinterpret_cast<const std::uint32_t*>(&header);
  for (int i = 0; i < cuda::kLatencyHeaderWords; ++i) words[i] = number << 32 | payload[i];
}

std::uint64_t LatencyRanks::num_sent(int rank, cuda::LatencyKind kind) {
  const std::byte* base = arenas_[static_cast<std::size_t>(rank)].data() + layout_.offset;
  const auto& local = *reinterpret_cast<const cuda::LatencyLocal*>(base + layout_.control.local);
  return local.sent[static_cast<int>(kind)] - options_.calls_before;
}

void LatencyRanks::grant_first_sets(int rank) {
  const auto base = [this](int at) { return arenas_[static_cast<std::size_t>(at)].data() + layout_.offset; };
  cuda::LatencyLocal& local = *reinterpret_cast<cuda::LatencyLocal*>(base(rank) + layout_.control.local);
  for (int kind = 0; kind < cuda::kLatencyKinds; ++kind) {
    local.sent[kind] = options_.calls_before;
    local.granted[kind] = options_.calls_before + cuda::kSets;
    for (int peer = 0; peer < options_.num_ranks; ++peer) {
      auto* grants = reinterpret_cast<std::uint64_t*>(base(peer) + layout_.control.grants);
      for (int set = 0; set < cuda::kSets; ++set) {
        const std::uint64_t number = options_.calls_before + 1 + static_cast<std::uint64_t>(set);
        const auto slot = static_cast<std::size_t>(kind * options_.num_ranks + rank) * cuda::kGrantSlots;
        grants[slot + number % cuda::kGrantSlots] = number << 32 | static_cast<std::uint64_t>(set);
      }
    }
  }
}

}  // namespace ferry::emulator
