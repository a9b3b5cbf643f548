#include "bench/raw_limit.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "bench/raw_exchange.hpp"
#include "common/timing.hpp"
#include "ferry/exchange.hpp"

namespace ferry::tools {

namespace {

constexpr std::size_t kLimitWarmup = 2;
constexpr double kMedian = 50.0;
/// Granularity in which cudaMalloc takes memory from the driver.
constexpr std::int64_t kDevicePageBytes = std::int64_t{2} << 20;
/// Numbers of multiprocessors that filled the links of 8 H200 in measurements: fewer do not, more slow each other down.
constexpr std::array<int, 3> kUsualNumSms = {7, 8, 16};

std::int64_t round_up(std::int64_t bytes, std::int64_t granule) { return (bytes + granule - 1) / granule * granule; }

/// Rounds of flags in one kernel: enough that its launch does not count.
constexpr int kFlagRounds = 1000;

/// Data that ranks gather before an exchange.
struct Offer {
  IpcHandle handle;
  std::int64_t process_id;
  std::byte* memory;  ///< for ranks of the same process, with the next
  std::int64_t device;
  std::int64_t num_rows;
};

/// Memory of one exchange.
class RawRanks {
 public:
  Status set_up(const RawLimitInput& input, RankContext& context, const RankDevice& device, bool is_local);
  const RawExchangeParams& params() const { return params_; }
  /// Median of several measurements of a flag's round trip.
  Result<std::int64_t> measure_flags(const RankContext& context, const RankDevice& device, const GpuTimer& timer);
  /// Collective: no rank frees memory that a peer may still use or has not closed.
  Status tear_down(RankContext& context);

 private:
  Result<std::vector<Offer>> exchange_offers(const Offer& mine, RankContext& context) const;
  Result<std::byte*> open(const Offer& offer);

  DeviceMemory local_;
  DeviceMemory received_;
  std::vector<IpcMemory> opened_;
  RawExchangeParams params_;
  RawFlagParams flags_;
};

Result<std::vector<Offer>> RawRanks::exchange_offers(const Offer& mine, RankContext& context) const {
  auto all = context.bootstrap()->all_gather(std::as_bytes(std::span(&mine, 1)), context.timeout_ns());
  if (!all) return all.status();
  std::vector<Offer> offers(all->size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    std::memcpy(&offers[rank], (*all)[rank].data(), std::min(sizeof(Offer), (*all)[rank].size()));
  }
  return offers;
}

Result<std::byte*> RawRanks::open(const Offer& offer) {
  if (offer.process_id == getpid()) {
    if (Status status = reach_device(static_cast<int>(offer.device)); !status) return status;
    return offer.memory;
  }
  auto memory = open_device_memory(offer.handle);
  if (!memory) return memory.status();
  opened_.push_back(std::move(*memory));
  return opened_.back().get();
}

Status RawRanks::set_up(const RawLimitInput& input, RankContext& context, const RankDevice& device, bool is_local) {
  const int num_ranks = context.num_ranks();
  Offer mine{};
  mine.num_rows = is_local ? input.num_sent_rows : input.num_sent_remote_rows;
  auto counts = exchange_offers(mine, context);
  if (!counts) return counts.status();
  std::int64_t num_rows = 0;
  for (const Offer& offer : *counts) num_rows += offer.num_rows;
  params_.num_rows = std::max<std::int64_t>((num_rows + num_ranks - 1) / num_ranks, 1);
  params_.row_bytes = round_up(input.row_bytes, kRowGranuleBytes);
  params_.row_stride = round_up(params_.row_bytes, kRawLineBytes);
  params_.num_targets = std::min(is_local ? num_ranks : num_ranks - 1, kMaxRawTargets);

  const std::int64_t section_bytes =
      (params_.num_rows + params_.num_targets - 1) / params_.num_targets * params_.row_stride;
  const auto local_bytes = static_cast<std::size_t>(params_.num_rows * params_.row_stride);
  // The rows are followed by a flag of each rank and this rank's word for a failure. Whole pages of the GPU, because
  // peers would also map other data in a shared page.
  const std::int64_t rows_bytes = section_bytes * num_ranks;
  const std::int64_t flags_bytes = (num_ranks + 1) * kRawLineBytes;
  const auto received_bytes = static_cast<std::size_t>(round_up(rows_bytes + flags_bytes, kDevicePageBytes));
  auto local = allocate_device_memory(local_bytes);
  if (!local) return local.status();
  local_ = std::move(*local);
  auto received = allocate_device_memory(received_bytes);
  if (!received) return received.status();
  received_ = std::move(*received);
  Status status = device.fill(local_.get(), 1, local_bytes);
  if (status) status = device.fill(received_.get(), 2, received_bytes);
  if (status) status = device.fill(received_.get() + rows_bytes, 0, static_cast<std::size_t>(flags_bytes));
  if (!status) return status;
  const auto flag_of = [&](std::byte* memory, std::int64_t flag_idx) {
    return reinterpret_cast<std::uint64_t*>(memory + rows_bytes + flag_idx * kRawLineBytes);
  };
  flags_.failed = flag_of(received_.get(), num_ranks);
  flags_.num_targets = params_.num_targets;
  params_.local = local_.get();

  auto handle = export_device_memory(received_);
  if (!handle) return handle.status();
  mine = {*handle, getpid(), received_.get(), device.ordinal(), params_.num_rows};
  auto offers = exchange_offers(mine, context);
  if (!offers) return offers.status();
  // Each rank starts with its right neighbour, so that no two ranks begin with the same target.
  const int first_distance = is_local ? 0 : 1;
  for (int i = 0; i < params_.num_targets; ++i) {
    const int target = (context.rank() + first_distance + i) % num_ranks;
    auto memory = open((*offers)[static_cast<std::size_t>(target)]);
    if (!memory) return memory.status();
    params_.sections[static_cast<std::size_t>(i)] = *memory + section_bytes * context.rank();
    flags_.theirs[static_cast<std::size_t>(i)] = flag_of(*memory, context.rank());
    flags_.mine[static_cast<std::size_t>(i)] = flag_of(received_.get(), target);
  }
  return {};
}

Result<std::int64_t> RawRanks::measure_flags(const RankContext& context, const RankDevice& device,
                                             const GpuTimer& timer) {
  flags_.num_rounds = kFlagRounds;
  flags_.timeout_ns = context.timeout_ns();
  const auto enqueue = [&] { return raw_flag_rounds(flags_, device.stream()); };
  const auto finish = [&] { return device.wait(); };
  std::vector<std::int64_t> round_trips_ns;
  for (std::size_t repetition = 0; repetition < kLimitWarmup + kLimitIterations; ++repetition) {
    auto times = timer.time({enqueue, finish});
    if (!times) return times.status();
    flags_.first += kFlagRounds;
    if (repetition >= kLimitWarmup) round_trips_ns.push_back(2 * times->events_ns / kFlagRounds);
  }
  std::uint64_t failed = 0;
  if (Status status = device.copy(&failed, flags_.failed, sizeof failed); !status) return status;
  if (failed != 0) {
    return Status(ErrorCode::kTimeout, fmt::format("raw flags: another rank did not answer within {} ns; see whether "
                                                   "its GPU is busy, or set --timeout",
                                                   flags_.timeout_ns));
  }
  return percentile(round_trips_ns, kMedian);
}

Status RawRanks::tear_down(RankContext& context) {
  if (Status status = context.barrier(); !status) return status;
  opened_.clear();
  return context.barrier();
}

std::set<int> numbers_of_sms(int call_num_sms, int all_sms) {
  std::set<int> numbers = {all_sms};
  for (int number : kUsualNumSms) numbers.insert(std::min(number, all_sms));
  if (call_num_sms > 0) numbers.insert(std::min(call_num_sms, all_sms));
  return numbers;
}

}  // namespace

Status measure_raw_limit(const RawLimitInput& input, RankContext& context, const RankDevice& device,
                         const GpuTimer& timer, DeviceReport* report) {
  report->limit_is_local = std::min(report->facts.num_devices, context.num_ranks()) == 1;
  RawRanks ranks;
  if (Status status = ranks.set_up(input, context, device, report->limit_is_local); !status) return status;
  if (input.with_flags && !report->limit_is_local && report->flag_round_trip_ns == 0) {
    auto round_trip_ns = ranks.measure_flags(context, device, timer);
    if (!round_trip_ns) return round_trip_ns.status();
    report->flag_round_trip_ns = *round_trip_ns;
  }
  const auto finish = [&] { return device.wait(); };
  for (const LimitMethod method : {LimitMethod::kPush, LimitMethod::kPull}) {
    for (const int num_sms : numbers_of_sms(input.call_num_sms, report->facts.num_sms)) {
      if (report->num_limit_runs == kMaxLimitRuns) break;
      LimitRun& run = report->limit_runs[report->num_limit_runs++];
      run.op = input.op;
      run.method = method;
      run.num_sms = num_sms;
      run.num_bytes = ranks.params().num_rows * input.row_bytes;
      const auto enqueue = [&] {
        return method == LimitMethod::kPush ? raw_push(ranks.params(), num_sms, device.stream())
                                            : raw_pull(ranks.params(), num_sms, device.stream());
      };
      for (std::size_t round = 0; round < kLimitWarmup + kLimitIterations; ++round) {
        auto times = timer.time({enqueue, finish});
        if (!times) return times.status();
        if (round >= kLimitWarmup) run.time_ns[round - kLimitWarmup] = times->events_ns;
      }
    }
  }
  return ranks.tear_down(context);
}

}  // namespace ferry::tools
