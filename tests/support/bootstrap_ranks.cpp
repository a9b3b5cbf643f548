#include "support/bootstrap_ranks.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <span>

#include "launch/status_report.hpp"

namespace ferry::test {
namespace {

constexpr char kCheckpointMark = 'c';
constexpr char kDoneMark = 'd';

}  // namespace

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

ForkedRank::ForkedRank(const Body& body)
    : process_(launch::ChildProcess::start([&](const launch::ReportPipe& pipe) {
                 const Status status = body([&] { pipe.send({&kCheckpointMark, 1}); });
                 return pipe.send(kDoneMark + launch::encode_status(status)) ? 0 : 1;
               }).value()) {}

Status ForkedRank::result() {
  process_.wait();
  const std::string_view report = process_.report();
  const std::size_t done = report.find(kDoneMark);
  if (done == std::string_view::npos) {
    return Status(ErrorCode::kInternal, "the rank's process ended without a report");
  }
  return launch::decode_status(report.substr(done + 1));
}

UniqueFd connect_stranger(std::uint16_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fd.reset();
  return fd;
}

void send_text(const UniqueFd& fd, std::string_view text) {
  (void)send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
}

void await_close(const UniqueFd& fd) {
  std::byte dropped[4096];
  for (;;) {
    const ssize_t num_bytes = read(fd.get(), dropped, sizeof dropped);
    if (num_bytes == 0 || (num_bytes < 0 && errno != EINTR)) return;
  }
}

}  // namespace ferry::test
