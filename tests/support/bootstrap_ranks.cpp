#include "support/bootstrap_ranks.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "bootstrap/frame.hpp"
#include "support/loopback_listener.hpp"

namespace ferry::test {
namespace {

constexpr char kCheckpointMark = 'c';
constexpr char kDoneMark = 'd';

void write_all(int fd, const void* data, std::size_t num_bytes) {
  const auto* from = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t moved = write(fd, from, num_bytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return;
    from += moved;
    num_bytes -= static_cast<std::size_t>(moved);
  }
}

std::vector<std::byte> read_to_end(int fd) {
  std::vector<std::byte> all;
  std::byte chunk[4096];
  for (;;) {
    const ssize_t moved = read(fd, chunk, sizeof chunk);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return all;
    all.insert(all.end(), chunk, chunk + moved);
  }
}

}  // namespace

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Meeting Meeting::prepare() {
  Meeting meeting;
  meeting.secret = make_random_secret().value();
  meeting.listen_fd = listen_on_loopback(&meeting.port).value();
  return meeting;
}

TcpBootstrapOptions Meeting::options(int rank, int num_ranks, std::int64_t timeout_ns) const {
  TcpBootstrapOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.port = port;
  options.secret = secret;
  options.timeout_ns = timeout_ns;
  if (rank == 0) options.listen_fd = listen_fd;
  return options;
}

ForkedRank::ForkedRank(const Body& body) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error(Status(ErrorCode::kSystem, "pipe2 failed"));
  reports_ = UniqueFd(ends[0]);
  UniqueFd report(ends[1]);
  pid_ = fork();
  if (pid_ != 0) return;
  reports_.reset();
  const Status status = body([&] { write_all(report.get(), &kCheckpointMark, 1); });
  write_all(report.get(), &kDoneMark, 1);
  if (!status.ok()) {
    const std::vector<std::byte> failure = bootstrap::encode_failure(status);
    write_all(report.get(), failure.data(), failure.size());
  }
  _exit(0);
}

ForkedRank::~ForkedRank() {
  if (pid_ <= 0) return;
  (void)kill(pid_, SIGKILL);
  (void)waitpid(pid_, nullptr, 0);
}

void ForkedRank::send_signal(int signal_number) const { (void)kill(pid_, signal_number); }

void ForkedRank::await_checkpoint() {
  char mark = 0;
  while (read(reports_.get(), &mark, 1) < 0 && errno == EINTR) {
  }
}

Status ForkedRank::result() {
  const std::vector<std::byte> report = read_to_end(reports_.get());
  const auto done = std::find(report.begin(), report.end(), static_cast<std::byte>(kDoneMark));
  if (done == report.end()) return Status(ErrorCode::kInternal, "the rank's process ended without a report");
  const std::span<const std::byte> failure(done + 1, report.end());
  if (failure.empty()) return {};
  return bootstrap::parse_failure(failure).value().to_status();
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

void await_close(const UniqueFd& fd) { (void)read_to_end(fd.get()); }

}  // namespace ferry::test
