#include "node/service_thread.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <exception>
#include <utility>

namespace ferry::node {

Result<std::thread> start_service_thread(const char* name, std::string_view what, std::function<void()> body) {
  // The new thread inherits this mask.
  sigset_t every_signal;
  sigset_t former;
  sigfillset(&every_signal);
  pthread_sigmask(SIG_SETMASK, &every_signal, &former);
  std::thread thread;
  Status status;
  try {
    thread = std::thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
  } catch (const std::exception& error) {
    status = Status(
        ErrorCode::kSystem,
        fmt::format("{}: starting a thread failed: {}; raise the limit of threads (ulimit -u)", what, error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
  if (!status.ok()) return status;
  return thread;
}

}  // namespace ferry::node
