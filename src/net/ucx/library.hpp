#ifndef FERRY_NET_UCX_LIBRARY_HPP
#define FERRY_NET_UCX_LIBRARY_HPP

/// Functions of UCX, resolved on first use: a library linked against libucp would not load on a machine without it.

#include <ucp/api/ucp.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::net::ucx {

struct Library {
  decltype(&ucp_get_version) get_version = nullptr;
  decltype(&ucp_config_read) config_read = nullptr;
  decltype(&ucp_config_modify) config_modify = nullptr;
  decltype(&ucp_config_release) config_release = nullptr;
  decltype(&ucp_init_version) init_version = nullptr;
  decltype(&ucp_cleanup) cleanup = nullptr;
  decltype(&ucp_context_query) context_query = nullptr;
  decltype(&ucp_worker_create) worker_create = nullptr;
  decltype(&ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&ucp_worker_get_address) worker_get_address = nullptr;
  decltype(&ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&ucp_worker_arm) worker_arm = nullptr;
  decltype(&ucp_worker_progress) worker_progress = nullptr;
  decltype(&ucp_worker_fence) worker_fence = nullptr;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = nullptr;
  decltype(&ucp_mem_map) mem_map = nullptr;
  decltype(&ucp_mem_query) mem_query = nullptr;
  decltype(&ucp_mem_unmap) mem_unmap = nullptr;
  decltype(&ucp_rkey_pack) rkey_pack = nullptr;
  decltype(&ucp_rkey_buffer_release) rkey_buffer_release = nullptr;
  decltype(&ucp_ep_rkey_unpack) ep_rkey_unpack = nullptr;
  decltype(&ucp_rkey_ptr) rkey_ptr = nullptr;
  decltype(&ucp_rkey_destroy) rkey_destroy = nullptr;
  decltype(&ucp_ep_create) ep_create = nullptr;
  decltype(&ucp_ep_close_nbx) ep_close_nbx = nullptr;
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx = nullptr;
  decltype(&ucp_ep_print_info) ep_print_info = nullptr;
  decltype(&ucp_put_nbx) put_nbx = nullptr;
  decltype(&ucp_get_nbx) get_nbx = nullptr;
  decltype(&ucp_am_send_nbx) am_send_nbx = nullptr;
  decltype(&ucp_request_check_status) request_check_status = nullptr;
  decltype(&ucp_request_free) request_free = nullptr;
  decltype(&ucs_status_string) status_string = nullptr;

  unsigned major = 0;     ///< of the version
  unsigned minor = 0;     ///< of the version
  std::string version{};  ///< "UCX 1.22": ranks can only connect if theirs are the same
  std::string file{};     ///< full version and path of the library, for display
};

/// The first call loads the library, from FERRY_UCX_LIBRARY (a folder or a file) if set, and runs only its load-time
/// constructors. Any thread may call this; the result is never destroyed.
/// @errors kUnsupported: not installed, too old, or different from the one that this process has loaded
Result<const Library*> library();

/// Converts the `status` of `operation`. Ok for UCS_OK, kPeerLost if the peer is gone, else kTransport.
Status ucx_status(ucs_status_t status, std::string_view operation, std::string_view hint = {}, int peer = -1);

/// Copy of an address or key that UCX has packed, followed by zeros: UCX reads these without a length. parse_blob
/// accepts only intact bytes; the zeros are for a reader that goes slightly past the end.
std::vector<std::byte> with_tail(std::span<const std::byte> packed);

/// Parameters of an endpoint to the worker at `address` (from with_tail). UCX calls `failed` with `argument` when the
/// endpoint is lost.
ucp_ep_params_t endpoint_params(const std::vector<std::byte>& address, ucp_err_handler_cb_t failed, void* argument);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_LIBRARY_HPP
