#include "core/group_log.hpp"

#include "core/present_ranks.hpp"
#include "core/tuning.hpp"
#include "ferry/version.hpp"

namespace ferry {
namespace {

double to_seconds(std::int64_t duration_ns) {
  return static_cast<double>(duration_ns) / static_cast<double>(kNsPerSecond);
}

int num_present(const BackendContext& context) {
  int present = 0;
  for (int rank = 0; rank < context.topology.num_ranks; ++rank) present += context.is_absent(rank) ? 0 : 1;
  return present;
}

}  // namespace

void log_options(std::string_view operation, const BackendContext& context, std::string_view backend) {
  if (!logs(LogLevel::kInfo)) return;
  const Topology& topology = context.topology;
  const GroupOptions& options = context.options;
  const LogRank rank = log_rank(topology);
  log_line(LogLevel::kInfo, rank,
           "{}: version={} commit={} backend={} nodes={} ranks_per_node={} node={} present_ranks={} timeout_s={} "
           "mask_lost_ranks={} mask_timeout_s={} verify={}",
           operation, version(), commit(), backend, topology.num_nodes(), topology.ranks_per_node,
           topology.node_of(topology.rank), num_present(context), to_seconds(options.timeout_ns),
           options.mask_lost_ranks, to_seconds(options.mask_timeout_ns), options.verify);
  const std::string tuning = tuning_path(options.tuning_file);
  log_line(LogLevel::kInfo, rank,
           "{}: options arena_bytes={} latency_bytes={} transport={} ring_memory={} net_devices=\"{}\" "
           "network_poll_s={} reserved_sms={} tuning_file=\"{}\" tuning_tables={}",
           operation, options.arena_bytes, options.latency_bytes, options.transport, options.ring_memory,
           options.net_devices,
           options.network_poll_ns == kAlwaysPoll ? "always" : fmt::format("{}", to_seconds(options.network_poll_ns)),
           options.num_reserved_sms == kDefaultReservedSms ? "default" : fmt::format("{}", options.num_reserved_sms),
           tuning, context.tuning.size());
}

void log_formed(std::string_view operation, const Topology& topology, Backend& backend) {
  if (!logs(LogLevel::kInfo)) return;
  const LogRank rank = log_rank(topology);
  const MemoryUsage memory = backend.memory_usage();
  log_line(LogLevel::kInfo, rank, "{}: memory control_bytes={} network_bytes={} staging_bytes={} allocated_bytes={}",
           operation, memory.control_bytes, memory.network_bytes, memory.staging_bytes, memory.allocated_bytes);
  if (topology.num_nodes() == 1) return;
  const NetworkUsage network = backend.network_usage();
  log_line(LogLevel::kInfo, rank,
           "{}: network transport={} devices=\"{}\" ring_memory={} why_host_memory=\"{}\" service_level={} paths={}",
           operation, network.transport, network.net_devices, network.ring_memory, network.why_host_memory,
           network.service_level, network.num_paths);
  for (const RailUsage& rail : network.rails) {
    log_line(LogLevel::kInfo, rank, "{}: peer={} node={} route=\"{}\"", operation, rail.rank,
             topology.node_of(rail.rank), rail.route);
  }
}

}  // namespace ferry
