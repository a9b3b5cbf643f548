#ifndef FERRY_NET_UCX_LIBRARY_HPP
#define FERRY_NET_UCX_LIBRARY_HPP

/// UCX's functions, resolved on first use: a library linked against libucp would not load on a machine without it.

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

  std::string version{};  ///< "UCX 1.22": of ranks that can be connected
  std::string file{};     ///< for people: the whole version, and the path of the library
};

/// The first call loads the library, from where FERRY_UCX_LIBRARY (a folder, or a file) says, and runs only its
/// load-time constructors. Callable from any thread; never destroyed.
/// @errors kUnsupported: not installed, too old, or not what this process has loaded already
Result<const Library*> library();

/// `status` of `operation` as a Status. Ok for UCS_OK, kPeerLost if the peer is gone, else kTransport.
Status ucx_status(ucs_status_t status, std::string_view operation, std::string_view hint = {}, int peer = -1);

/// A copy of an address or key that UCX has packed, and zeros behind it: UCX reads such without knowing their length.
/// What parse_blob accepts is what the peer packed; the zeros are for a reader that reads slightly past the end.
std::vector<std::byte> with_tail(std::span<const std::byte> packed);

/// Of an endpoint to the worker whose address this is, with_tail: UCX tells `failed` with `argument` that it is lost.
ucp_ep_params_t endpoint_params(const std::vector<std::byte>& address, ucp_err_handler_cb_t failed, void* argument);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_LIBRARY_HPP
