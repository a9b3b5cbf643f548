#include "net/ucx/library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace ferry::net::ucx {
namespace {

/// Location of UCX on machines with several: the folder of its libucp.so.0, or that file.
constexpr const char* kLibraryVariable = "FERRY_UCX_LIBRARY";
/// Same location, set at build time (CMake's FERRY_UCX_LIBRARY); empty: the loader searches.
constexpr std::string_view kBuiltInLibrary = FERRY_UCX_LIBRARY;
constexpr const char* kLibraryName = "libucp.so.0";
constexpr std::string_view kInstallHint =
    "install UCX 1.11 or newer (libucx0 on Debian and Ubuntu), or name the folder of its libucp.so.0 in "
    "FERRY_UCX_LIBRARY";
constexpr unsigned kOldestMajor = 1;
constexpr unsigned kOldestMinor = 11;

struct LoadedLibrary {
  Library table;
  Status status;
};

/// Removes the handlers for faults and SIGHUP that UCX installs when it is loaded, unless UCX_HANDLE_ERRORS asks for
/// them: a library should not decide how a program reacts to signals.
class SignalHandlersKept {
 public:
  SignalHandlersKept() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~SignalHandlersKept() {
    if (std::getenv("UCX_HANDLE_ERRORS") != nullptr) return;
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  SignalHandlersKept(const SignalHandlersKept&) = delete;
  SignalHandlersKept& operator=(const SignalHandlersKept&) = delete;

 private:
  static constexpr std::array<int, 6> kSignals{SIGHUP, SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
  std::array<struct sigaction, kSignals.size()> before_{};
};

/// Silences UCX's own report of a lost peer, which Ferry returns as a Status. UCX's log level is not part of a
/// context's configuration, so this sets it for the whole process, and only if no other code in the process uses UCX
/// and the level is not set.
void keep_quiet(void* ucs) {
  if (std::getenv("UCX_LOG_LEVEL") != nullptr) return;
  using SetValue = ucs_status_t (*)(const char* name, const char* value);
  if (const auto set_value = reinterpret_cast<SetValue>(dlsym(ucs, "ucs_global_opts_set_value"))) {
    set_value("LOG_LEVEL", "FATAL");
  }
}

Status not_loaded() {
  const char* reason = dlerror();
  return Status(ErrorCode::kUnsupported,
                fmt::format("network engine ucx: {}; {}", reason != nullptr ? reason : "the library cannot be loaded",
                            kInstallHint));
}

/// Library to load: a path, or a name that the loader searches for.
std::filesystem::path wanted_library() {
  const char* variable = std::getenv(kLibraryVariable);
  const std::string_view wanted = variable != nullptr && *variable != '\0' ? variable : kBuiltInLibrary;
  if (wanted.empty()) return kLibraryName;
  std::error_code error;
  std::filesystem::path path(wanted);
  return std::filesystem::is_directory(path, error) ? path / kLibraryName : path;
}

/// Empty if no library of that name is loaded.
std::string file_of_loaded(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return {};
  link_map* map = nullptr;
  std::string file = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
  dlclose(library);
  return file;
}

/// Refuses a second UCX: a process has one library per name, so parts of the loaded UCX would be combined with the
/// wanted one.
Status check_not_another(const std::filesystem::path& wanted) {
  if (!wanted.has_parent_path()) return {};
  for (const char* name : {kLibraryName, "libucs.so.0"}) {
    const std::string loaded = file_of_loaded(name);
    std::error_code error;
    if (loaded.empty() || std::filesystem::equivalent(loaded, wanted.parent_path() / name, error)) continue;
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("network engine ucx: {} is to be loaded, but this process has {} already (another library "
                    "of it, such as MPI, uses UCX); clear {}, or have the loader find the same UCX for both "
                    "(LD_LIBRARY_PATH)",
                    wanted.string(), loaded, kLibraryVariable));
  }
  return {};
}

/// Null if it cannot be loaded. Never unloaded: UCX has threads and hooks that outlive its users.
void* load_ucp(const std::filesystem::path& wanted) {
  constexpr int kHow = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
  std::error_code error;
  // Load its parts from the same folder, whether or not it names that folder itself; each needs the ones before it.
  for (const char* part : {"libucm.so.0", "libucs.so.0", "libuct.so.0"}) {
    const std::filesystem::path file = wanted.parent_path() / part;
    if (wanted.has_parent_path() && std::filesystem::exists(file, error)) (void)dlopen(file.c_str(), kHow);
  }
  return dlopen(wanted.c_str(), kHow);
}

LoadedLibrary load_library() {
  LoadedLibrary loaded;
  const std::filesystem::path wanted = wanted_library();
  loaded.status = check_not_another(wanted);
  if (!loaded.status.ok()) return loaded;
  const bool in_use = !file_of_loaded("libucs.so.0").empty();
  void* ucp = nullptr;
  void* ucs = nullptr;
  {
    const SignalHandlersKept handlers;
    ucp = load_ucp(wanted);
    if (ucp != nullptr) ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  }
  if (ucp == nullptr || ucs == nullptr) {
    loaded.status = not_loaded();
    return loaded;
  }
  if (!in_use) keep_quiet(ucs);
  const auto need = [&loaded](void* from, const char* name, auto* function) {
    if (!loaded.status.ok()) return;
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(from, name));
    if (*function == nullptr) loaded.status = not_loaded();
  };
  Library& table = loaded.table;
  need(ucp, "ucp_get_version", &table.get_version);
  need(ucp, "ucp_config_read", &table.config_read);
  need(ucp, "ucp_config_modify", &table.config_modify);
  need(ucp, "ucp_config_release", &table.config_release);
  need(ucp, "ucp_init_version", &table.init_version);
  need(ucp, "ucp_cleanup", &table.cleanup);
  need(ucp, "ucp_context_query", &table.context_query);
  need(ucp, "ucp_worker_create", &table.worker_create);
  need(ucp, "ucp_worker_destroy", &table.worker_destroy);
  need(ucp, "ucp_worker_get_address", &table.worker_get_address);
  need(ucp, "ucp_worker_release_address", &table.worker_release_address);
  need(ucp, "ucp_worker_get_efd", &table.worker_get_efd);
  need(ucp, "ucp_worker_arm", &table.worker_arm);
  need(ucp, "ucp_worker_progress", &table.worker_progress);
  need(ucp, "ucp_worker_fence", &table.worker_fence);
  need(ucp, "ucp_worker_set_am_recv_handler", &table.worker_set_am_recv_handler);
  need(ucp, "ucp_mem_map", &table.mem_map);
  need(ucp, "ucp_mem_query", &table.mem_query);
  need(ucp, "ucp_mem_unmap", &table.mem_unmap);
  need(ucp, "ucp_rkey_pack", &table.rkey_pack);
  need(ucp, "ucp_rkey_buffer_release", &table.rkey_buffer_release);
  need(ucp, "ucp_ep_rkey_unpack", &table.ep_rkey_unpack);
  need(ucp, "ucp_rkey_ptr", &table.rkey_ptr);
  need(ucp, "ucp_rkey_destroy", &table.rkey_destroy);
  need(ucp, "ucp_ep_create", &table.ep_create);
  need(ucp, "ucp_ep_close_nbx", &table.ep_close_nbx);
  need(ucp, "ucp_ep_flush_nbx", &table.ep_flush_nbx);
  need(ucp, "ucp_ep_print_info", &table.ep_print_info);
  need(ucp, "ucp_put_nbx", &table.put_nbx);
  need(ucp, "ucp_get_nbx", &table.get_nbx);
  need(ucp, "ucp_am_send_nbx", &table.am_send_nbx);
  need(ucp, "ucp_request_check_status", &table.request_check_status);
  need(ucp, "ucp_request_free", &table.request_free);
  need(ucs, "ucs_status_string", &table.status_string);
  if (!loaded.status.ok()) return loaded;
  unsigned patch = 0;
  table.get_version(&table.major, &table.minor, &patch);
  const auto [major, minor] = std::pair(table.major, table.minor);
  table.version = fmt::format("UCX {}.{}", major, minor);
  table.file = fmt::format("UCX {}.{}.{}, {}", major, minor, patch, file_of_loaded(kLibraryName));
  if (major != kOldestMajor || minor < kOldestMinor) {
    loaded.status = Status(ErrorCode::kUnsupported, fmt::format("network engine ucx: the installed UCX is {}.{}.{}; {}",
                                                                major, minor, patch, kInstallHint));
  }
  return loaded;
}

const LoadedLibrary& loaded_library() {
  // Never destroyed: engines may be closed while the process's statics are being destroyed.
  static const LoadedLibrary& loaded = *new LoadedLibrary(load_library());
  return loaded;
}

bool means_peer_lost(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_CANCELED:
      return true;
    default:
      return false;
  }
}

}  // namespace

Result<const Library*> library() {
  const LoadedLibrary& loaded = loaded_library();
  if (!loaded.status.ok()) return loaded.status;
  return &loaded.table;
}

Status ucx_status(ucs_status_t status, std::string_view operation, std::string_view hint, int peer) {
  if (status == UCS_OK) return {};
  const Result<const Library*> table = library();
  std::string message = fmt::format("network engine ucx: {}: {}", operation,
                                    table.ok() ? (*table)->status_string(status) : "UCX is not loaded");
  if (!hint.empty()) message.append("; ").append(hint);
  return Status(means_peer_lost(status) ? ErrorCode::kPeerLost : ErrorCode::kTransport, std::move(message), peer);
}

std::vector<std::byte> with_tail(std::span<const std::byte> packed) {
  constexpr std::size_t kTailBytes = 1024;
  std::vector<std::byte> copy(packed.size() + kTailBytes);
  std::ranges::copy(packed, copy.begin());
  return copy;
}

ucp_ep_params_t endpoint_params(const std::vector<std::byte>& address, ucp_err_handler_cb_t failed, void* argument) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = failed;
  params.err_handler.arg = argument;
  return params;
}

}  // namespace ferry::net::ucx
