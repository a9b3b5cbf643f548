#include "run/backend_probe.hpp"

#include <fmt/format.h>

#include <string>

#include "device/device_memory.hpp"
#include "launch/child_process.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

namespace {

template <typename Info>
std::string to_text(const std::vector<Info>& infos) {
  Json all = Json::array();
  for (const Info& info : infos) all.push_back({info.name, info.description, info.available, info.reason});
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Result of `list` from a child process that does nothing else.
template <typename Info>
Result<std::vector<Info>> ask_child(std::vector<Info> (*list)(), const char* advice) {
  auto child = launch::ChildProcess::start(
      [list](const launch::ReportPipe& pipe) { return pipe.send(to_text(list())) ? 0 : 1; });
  if (!child) {
    return Status(ErrorCode::kSystem,
                  fmt::format("cannot look for backends and networks: {}", child.status().message()));
  }
  child->wait();
  const Json all = Json::parse(child->report(), nullptr, false);
  if (!all.is_array()) return Status(ErrorCode::kSystem, advice);
  std::vector<Info> infos;
  for (const Json& info : all) {
    infos.push_back({info.at(0).get<std::string>(), info.at(1).get<std::string>(), info.at(2).get<bool>(),
                     info.at(3).get<std::string>()});
  }
  return infos;
}

}  // namespace

Result<std::vector<BackendInfo>> probe_backends() {
  if (!built_with_cuda()) return backends();
  return ask_child(backends,
                   "the process that looked for backends died; run nvidia-smi to see whether the driver works");
}

Result<std::vector<TransportInfo>> probe_transports() {
  return ask_child(transports, "the process that looked for networks died; run ucx_info -v to see whether UCX works");
}

}  // namespace ferry::tools
