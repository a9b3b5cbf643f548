// Handlers for XLA that dispatch and combine in host memory, for 17_jax.py. They go through the C interface, so any
// compiler's C++ will do; jaxlib brings XLA's header.
//
// A dispatch returns the pointer to its routing as eight bytes, and the combine takes it: it gives the two the same
// order in XLA's program as they must have, and the combine frees it.
#include <xla/ffi/api/ffi.h>
#include <cstdint>
#include <cstring>
#include <string>

#include "ferry/ferry.h"

namespace {

namespace ffi = xla::ffi;

ffi::Error to_error(ferry_status* status) {
  if (status == nullptr) return ffi::Error::Success();
  ffi::Error error = ffi::Error::Internal(ferry_status_message(status));
  ferry_status_free(status);
  return error;
}

template <typename Buffer>
ferry_tensor to_tensor(const Buffer& buffer, int32_t dtype) {
  ferry_tensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype;
  for (const int64_t extent : buffer.dimensions()) tensor.shape[tensor.num_dims++] = extent;
  return tensor;
}

ferry_group* group_of(int64_t handle) { return reinterpret_cast<ferry_group*>(handle); }

// Rows of x to the slab [L, C, H] of the ranks that own their experts. XLA knows all shapes beforehand, which is what
// slabs are for.
ffi::Error dispatch(int64_t group, int64_t num_experts, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> topk_idx,
                    ffi::Buffer<ffi::F32> topk_weights, ffi::ResultBuffer<ffi::F32> slab,
                    ffi::ResultBuffer<ffi::U8> routing_bytes) {
  ferry_route_input choice{};
  choice.struct_size = sizeof(choice);
  choice.topk_idx = to_tensor(topk_idx, FERRY_INT32);
  choice.topk_weights = to_tensor(topk_weights, FERRY_FLOAT32);
  ferry_route_options options{};
  options.struct_size = sizeof(options);
  options.num_experts = num_experts;
  options.layout = FERRY_LAYOUT_SLAB;
  options.slab_capacity = slab->dimensions()[1];
  ferry_routing* routing = nullptr;
  ferry_status* status = ferry_route(group_of(group), &choice, &options, nullptr, &routing);
  if (status != nullptr) return to_error(status);

  ferry_dispatch_input send{};
  send.struct_size = sizeof(send);
  send.x = to_tensor(x, FERRY_FLOAT32);
  ferry_dispatch_output receive{};
  receive.struct_size = sizeof(receive);
  receive.x = to_tensor(*slab, FERRY_FLOAT32);
  ferry_dispatch_options how{};
  how.struct_size = sizeof(how);
  how.zero_padding = 1;  // the experts compute on every row
  status = ferry_dispatch(group_of(group), routing, &send, &receive, &how, nullptr);
  if (status != nullptr) {
    ferry_routing_free(routing);
    return to_error(status);
  }
  std::memcpy(routing_bytes->typed_data(), &routing, sizeof(routing));
  return ffi::Error::Success();
}

// The experts' rows back to their tokens, summed with the router's weights.
ffi::Error combine(int64_t group, ffi::Buffer<ffi::F32> slab, ffi::Buffer<ffi::U8> routing_bytes,
                   ffi::ResultBuffer<ffi::F32> out) {
  ferry_routing* routing = nullptr;
  std::memcpy(&routing, routing_bytes.typed_data(), sizeof(routing));
  ferry_combine_input results{};
  results.struct_size = sizeof(results);
  results.x = to_tensor(slab, FERRY_FLOAT32);
  ferry_combine_output sums{};
  sums.struct_size = sizeof(sums);
  sums.x = to_tensor(*out, FERRY_FLOAT32);
  ferry_combine_options options{};
  options.struct_size = sizeof(options);
  options.weighted = 1;
  ferry_status* status = ferry_combine(group_of(group), routing, &results, &sums, &options, nullptr);
  ferry_routing_free(routing);
  return to_error(status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_dispatch, dispatch,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("num_experts")
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x [T, H]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // topk_idx [T, K]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // topk_weights [T, K]
                                  .Ret<ffi::Buffer<ffi::F32>>()   // slab [L, C, H]
                                  .Ret<ffi::Buffer<ffi::U8>>());  // routing [8]

XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_combine, combine,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("group")
                                  .Arg<ffi::Buffer<ffi::F32>>()    // slab [L, C, H]
                                  .Arg<ffi::Buffer<ffi::U8>>()     // routing [8]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // out [T, H]

// The group of this process, by the variables of docs/bootstrap.md. 0 where that failed; the reason is printed.
extern "C" FERRY_C_API int64_t ferry_jax_open() {
  ferry_bootstrap* bootstrap = nullptr;
  ferry_group* group = nullptr;
  ferry_group_options options{};
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  ferry_status* status = ferry_bootstrap_create_from_environment(0, &bootstrap);
  if (status == nullptr) status = ferry_group_create(bootstrap, &options, &group);
  if (status != nullptr) std::fprintf(stderr, "%s\n", ferry_status_message(status));
  ferry_status_free(status);
  ferry_bootstrap_free(bootstrap);
  return reinterpret_cast<int64_t>(group);
}

extern "C" FERRY_C_API void ferry_jax_close(int64_t group) {
  ferry_status_free(ferry_group_destroy(group_of(group)));
  ferry_group_free(group_of(group));
}
