#include "common/backend_probe.hpp"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/device_memory.hpp"
#include "common/json_report.hpp"

namespace ferry::tools {

namespace {

template <typename Info>
std::string to_text(const std::vector<Info>& infos) {
  Json all = Json::array();
  for (const Info& info : infos) all.push_back({info.name, info.description, info.available, info.reason});
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // the reader sees a text that ends too early
    done += static_cast<std::size_t>(count);
  }
}

std::string read_to_end(int fd) {
  std::string text;
  std::array<char, 4096> piece{};
  while (true) {
    const ssize_t count = read(fd, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(count));
  }
}

Status system_error(const char* what) {
  return {ErrorCode::kSystem, fmt::format("cannot look for backends and networks: {}: {}", what, std::strerror(errno))};
}

/// `look`'s infos, from a child that only looks.
template <typename Info>
Result<std::vector<Info>> ask_child(std::vector<Info> (*look)(), const char* advice) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return system_error("pipe");
  const pid_t child = fork();
  if (child < 0) {
    const Status status = system_error("fork");
    close(ends[0]);
    close(ends[1]);
    return status;
  }
  if (child == 0) {
    close(ends[0]);
    write_all(ends[1], to_text(look()));
    _exit(0);
  }
  close(ends[1]);
  const std::string text = read_to_end(ends[0]);
  close(ends[0]);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  const Json all = Json::parse(text, nullptr, false);
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
