/// The one function of libucs that Ferry calls.

#include <ucs/type/status.h>

extern "C" const char* ucs_status_string(ucs_status_t status) {
  switch (status) {
    case UCS_OK:
      return "Success";
    case UCS_ERR_IO_ERROR:
      return "Input/output error";
    case UCS_ERR_NO_MEMORY:
      return "Out of memory";
    case UCS_ERR_INVALID_PARAM:
      return "Invalid parameter";
    case UCS_ERR_UNREACHABLE:
      return "Destination is unreachable";
    case UCS_ERR_CANCELED:
      return "Request canceled";
    case UCS_ERR_UNSUPPORTED:
      return "Unsupported operation";
    case UCS_ERR_CONNECTION_RESET:
      return "Connection reset by remote peer";
    case UCS_ERR_ENDPOINT_TIMEOUT:
      return "Endpoint timeout";
    default:
      return "an error of the stand-in card";
  }
}
