/// C interface of groups and their memory.

#include "ferry/group.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

namespace ferry::c {
namespace {

constexpr const char* kNoGroup = "the group is null";

Result<GroupOptions> to_options(const char* call, const ferry_group_options& read) {
  GroupOptions options;
  Status status = read_ranks(call, "present_ranks", read.present_ranks, read.num_present_ranks, options.present_ranks);
  if (!status.ok()) return status;
  options.num_ranks = read.num_ranks;
  options.backend = text_or(read.backend, options.backend.c_str());
  options.transport = text_or(read.transport, options.transport.c_str());
  options.ring_memory = text_or(read.ring_memory, options.ring_memory.c_str());
  options.net_devices = text_or(read.net_devices, "");
  options.tuning_file = text_or(read.tuning_file, "");
  options.arena_bytes = nonzero_or(static_cast<std::size_t>(read.arena_bytes), options.arena_bytes);
  options.timeout_ns = nonzero_or(read.timeout_ns, options.timeout_ns);
  options.latency_bytes = static_cast<std::size_t>(read.latency_bytes);
  options.mask_timeout_ns = nonzero_or(read.mask_timeout_ns, options.mask_timeout_ns);
  options.ranks_per_node = read.ranks_per_node;
  options.mask_lost_ranks = read.mask_lost_ranks != 0;
  if (read.use_device != 0) options.device = read.device;
  if (read.num_reserved_sms != 0) options.num_reserved_sms = std::max(read.num_reserved_sms, 0);
  options.verify = read.verify != 0;
  options.network_poll_ns = read.network_poll_ns;
  if (read.network_service_level != 0) options.network_service_level = std::max(read.network_service_level, 0);
  options.network_paths = read.network_paths;
  if (read.interrupted != nullptr) {
    options.interrupted = [ask = read.interrupted, user = read.interrupted_user] { return ask(user) != 0; };
  }
  return options;
}

Status create(ferry_bootstrap* bootstrap, const ferry_group_options* given, ferry_group** handle) {
  constexpr const char* kCall = "ferry_group_create";
  if (bootstrap == nullptr) return invalid(kCall, "the bootstrap is null");
  ferry_group_options read;
  Status status = handle == nullptr ? invalid(kCall, "the pointer to the group is null") : Status();
  if (status.ok()) status = read_struct(kCall, given, read);
  Result<GroupOptions> options = status.ok() ? to_options(kCall, read) : Result<GroupOptions>(status);
  if (!options.ok()) {
    GroupOptions refused;
    refused.backend = kUnreadable;
    refused.timeout_ns = kRefusalTimeoutNs;
    (void)Group::create(bootstrap->value, refused);
    return options.status();
  }
  auto made = std::make_unique<ferry_group>();
  auto group = Group::create(bootstrap->value, *options);
  if (!group.ok()) return group.status();
  made->value = std::move(*group);
  *handle = made.release();
  return {};
}

Status suspend(ferry_group* group, std::int32_t* silent_ranks, std::int64_t num, std::int64_t* num_silent) {
  constexpr const char* kCall = "ferry_group_suspend";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  if (silent_ranks == nullptr || num_silent == nullptr || num != group->value->num_ranks()) {
    return invalid(kCall, "expected room for as many silent ranks as the group has ranks, and for their number");
  }
  Result<std::vector<int>> silent = group->value->suspend();
  if (!silent.ok()) return silent.status();
  std::ranges::copy(*silent, silent_ranks);
  *num_silent = std::ssize(*silent);
  return {};
}

Status renew(ferry_group* group, ferry_bootstrap* bootstrap, const std::int32_t* present_ranks, std::int64_t num) {
  constexpr const char* kCall = "ferry_group_renew";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  if (bootstrap == nullptr) return invalid(kCall, "the bootstrap is null");
  std::vector<int> present;
  const Status status = read_ranks(kCall, "present_ranks", present_ranks, num, present);
  // A list that cannot be read is an empty one for the others: all ranks refuse it, so that none waits for this one.
  Status renewed = group->value->renew(bootstrap->value, present);
  return status.ok() ? renewed : status;
}

Status fill_topology(const ferry_group* group, ferry_topology* wanted) {
  constexpr const char* kCall = "ferry_group_topology";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  const Topology& topology = group->value->topology();
  ferry_topology known{};
  known.rank = topology.rank;
  known.num_ranks = topology.num_ranks;
  known.ranks_per_node = topology.ranks_per_node;
  known.num_nodes = topology.num_nodes();
  return write_struct(kCall, known, wanted);
}

Status fill_memory_usage(const ferry_group* group, ferry_memory_usage* wanted) {
  constexpr const char* kCall = "ferry_group_memory_usage";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  const MemoryUsage usage = group->value->memory_usage();
  ferry_memory_usage known{};
  known.control_bytes = usage.control_bytes;
  known.network_bytes = usage.network_bytes;
  known.staging_bytes = usage.staging_bytes;
  known.allocated_bytes = usage.allocated_bytes;
  known.total_bytes = usage.total_bytes();
  return write_struct(kCall, known, wanted);
}

Status fill_wait_times(const ferry_group* group, std::int64_t* times_ns, std::int64_t num) {
  constexpr const char* kCall = "ferry_group_wait_times_ns";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  if (times_ns == nullptr || num != group->value->num_ranks()) {
    return invalid(kCall, "expected room for one number for each rank");
  }
  const std::vector<std::int64_t> times = group->value->wait_times_ns();
  if (times.empty()) return invalid(kCall, "this group was destroyed");
  std::ranges::copy(times, times_ns);
  return {};
}

Status allocate(ferry_group* group, std::uint64_t num_bytes, ferry_buffer** handle) {
  constexpr const char* kCall = "ferry_group_allocate";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  if (handle == nullptr) return invalid(kCall, "the pointer to the buffer is null");
  auto made = std::make_unique<ferry_buffer>();
  Result<Buffer> buffer = group->value->allocate(static_cast<std::size_t>(num_bytes));
  if (!buffer.ok()) return buffer.status();
  made->value = std::move(*buffer);
  *handle = made.release();
  return {};
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_group_create(ferry_bootstrap* bootstrap, const ferry_group_options* options, ferry_group** group) {
  return guarded([&] { return create(bootstrap, options, group); });
}

ferry_status* ferry_group_destroy(ferry_group* group) {
  return guarded([&] { return group == nullptr ? invalid("ferry_group_destroy", kNoGroup) : group->value->destroy(); });
}

void ferry_group_free(ferry_group* group) { delete group; }

ferry_status* ferry_group_suspend(ferry_group* group, int32_t* silent_ranks, int64_t num, int64_t* num_silent) {
  return guarded([&] { return suspend(group, silent_ranks, num, num_silent); });
}

ferry_status* ferry_group_renew(ferry_group* group, ferry_bootstrap* bootstrap, const int32_t* present_ranks,
                                int64_t num) {
  return guarded([&] { return renew(group, bootstrap, present_ranks, num); });
}

ferry_status* ferry_group_topology(const ferry_group* group, ferry_topology* topology) {
  return guarded([&] { return fill_topology(group, topology); });
}

int32_t ferry_group_rank(const ferry_group* group) { return group == nullptr ? -1 : group->value->rank(); }
int32_t ferry_group_num_ranks(const ferry_group* group) { return group == nullptr ? 0 : group->value->num_ranks(); }

const char* ferry_group_backend(const ferry_group* group) {
  return group == nullptr ? "" : group->value->backend().data();  // a literal, so it ends with a zero
}

ferry_status* ferry_group_memory_usage(const ferry_group* group, ferry_memory_usage* usage) {
  return guarded([&] { return fill_memory_usage(group, usage); });
}

ferry_status* ferry_group_wait_times_ns(const ferry_group* group, int64_t* times_ns, int64_t num) {
  return guarded([&] { return fill_wait_times(group, times_ns, num); });
}

ferry_status* ferry_group_trim(ferry_group* group) {
  return guarded([&] { return group == nullptr ? invalid("ferry_group_trim", kNoGroup) : group->value->trim(); });
}

ferry_status* ferry_group_wait(ferry_group* group, void* stream) {
  return guarded(
      [&] { return group == nullptr ? invalid("ferry_group_wait", kNoGroup) : group->value->wait(to_stream(stream)); });
}

ferry_status* ferry_group_poll(ferry_group* group) {
  return guarded([&] { return group == nullptr ? invalid("ferry_group_poll", kNoGroup) : group->value->poll(); });
}

ferry_status* ferry_group_allocate(ferry_group* group, uint64_t num_bytes, ferry_buffer** buffer) {
  return guarded([&] { return allocate(group, num_bytes, buffer); });
}

void* ferry_buffer_data(const ferry_buffer* buffer) { return buffer == nullptr ? nullptr : buffer->value.data(); }

uint64_t ferry_buffer_num_bytes(const ferry_buffer* buffer) {
  return buffer == nullptr ? 0 : buffer->value.size_bytes();
}

void ferry_buffer_free(ferry_buffer* buffer) { delete buffer; }
