#ifndef FERRY_BASE_H
#define FERRY_BASE_H

/// C interface: version, status, tensors, and the backends and networks of a build. Include ferry/ferry.h.

#include <stdint.h>

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// Marker of functions that the shared library exports.
#define FERRY_C_API __attribute__((visibility("default")))

/// Grows when functions, members or constants are added; existing ones keep their meaning and numbers.
#define FERRY_ABI_VERSION 7

/// FERRY_ABI_VERSION of the library.
FERRY_C_API uint32_t ferry_abi_version(void);
/// "MAJOR.MINOR.PATCH" and commit of the library. Static.
FERRY_C_API const char* ferry_version(void);
FERRY_C_API const char* ferry_commit(void);

// ---- Status ---------------------------------------------------------------------------------------------------------

/// Result of a call: NULL if it succeeded, otherwise a description that the caller frees.
typedef struct ferry_status ferry_status;

/// ferry::ErrorCode; docs/errors.md lists what stays usable after each.
enum {
  FERRY_OK = 0,
  FERRY_ERROR_INVALID_ARGUMENT = 1,
  FERRY_ERROR_UNSUPPORTED = 2,
  FERRY_ERROR_CAPACITY = 3,
  FERRY_ERROR_TIMEOUT = 4,
  FERRY_ERROR_PEER_LOST = 5,
  FERRY_ERROR_TRANSPORT = 6,
  FERRY_ERROR_CUDA = 7,
  FERRY_ERROR_SYSTEM = 8,
  FERRY_ERROR_INTERNAL = 9,
  FERRY_ERROR_DATA_CORRUPT = 10
};

/// FERRY_OK for NULL.
FERRY_C_API int32_t ferry_status_code(const ferry_status* status);
/// The rank that was waited for, died or disagreed; -1 if no single rank is at fault, and for NULL.
FERRY_C_API int32_t ferry_status_peer(const ferry_status* status);
/// Failed operation, place, observed and expected values, remedy. "" for NULL; otherwise valid until the status is
/// freed.
FERRY_C_API const char* ferry_status_message(const ferry_status* status);
FERRY_C_API void ferry_status_free(ferry_status* status);
/// Name of a code, such as "kTimeout" for FERRY_ERROR_TIMEOUT; "unknown" for other numbers. Static.
FERRY_C_API const char* ferry_code_name(int32_t code);

// ---- Tensors --------------------------------------------------------------------------------------------------------

/// ferry::DType.
enum {
  FERRY_UINT8 = 0,
  FERRY_INT32 = 1,
  FERRY_INT64 = 2,
  FERRY_FLOAT32 = 3,
  FERRY_FLOAT16 = 4,
  FERRY_BFLOAT16 = 5,
  FERRY_FLOAT8_E4M3 = 6,
  FERRY_INT8 = 7
};

enum { FERRY_MAX_TENSOR_DIMS = 3 };

/// View of memory that it does not own. All zero: absent, that is, this input or output is not used. This struct never
/// grows.
typedef struct ferry_tensor {
  void* data;        ///< inputs are only read
  int32_t dtype;     ///< FERRY_UINT8, …
  int32_t num_dims;  ///< 1 to 3; 0: absent
  int64_t shape[FERRY_MAX_TENSOR_DIMS];
  int64_t strides[FERRY_MAX_TENSOR_DIMS];  ///< in elements; all zero: contiguous, row-major
} ferry_tensor;

/// Whether a call is to end early: a value other than 0 ends it (ferry::GroupOptions::interrupted,
/// ferry::BalanceOptions::interrupted). Called about ten times a second by the thread that makes the call; must return
/// soon, and must not call the group.
typedef int32_t (*ferry_interrupted)(void* user);

// ---- Backends and networks of this build ---------------------------------------------------------------------------

/// List of backends, or of networks between nodes.
typedef struct ferry_component_list ferry_component_list;

typedef struct ferry_component {
  uint64_t struct_size;     ///< set by the library
  const char* name;         ///< value for ferry_group_options::backend or ferry_group_options::transport
  const char* description;  ///< one line
  const char* reason;       ///< why it is not available, and the remedy; "" if it is
  const char* library;      ///< network: version and path of the library that it loaded; "": none
  int32_t available;        ///< can run on this machine now
  int32_t reserved;
} ferry_component;

/// Best first.
FERRY_C_API ferry_status* ferry_backends(ferry_component_list** list);
FERRY_C_API ferry_status* ferry_transports(ferry_component_list** list);
FERRY_C_API int64_t ferry_component_list_size(const ferry_component_list* list);
/// NULL if there is no such element. Belongs to the list.
FERRY_C_API const ferry_component* ferry_component_list_at(const ferry_component_list* list, int64_t index);
FERRY_C_API void ferry_component_list_free(ferry_component_list* list);

/// Execution place of a call that needs no group.
typedef struct ferry_execution_options {
  uint64_t struct_size;
  const char* backend;  ///< NULL: "cpu", done on return. "cuda": on the stream
  int32_t use_device;   ///< "cuda": memory of the GPU `device`; 0: the calling thread's current one
  int32_t device;
} ferry_execution_options;

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_BASE_H
