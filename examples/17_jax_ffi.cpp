// XLA handlers that dispatch and combine, for 17_jax.py: in host memory, and in GPU memory on XLA's streams. They use
// the C interface, so any compiler's C++ will do; jaxlib contains XLA's header.
//
// A combine needs the routing of its dispatch. The program gives both the same number `layer`; the slab, an output of
// the one and an input of the other, orders them in XLA's program.
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

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

// This process's group, and the routings whose combine has not been called yet.
struct Rank {
  ferry_group* group = nullptr;
  std::mutex mutex;
  std::map<int64_t, ferry_routing*> routings;  // by layer

  // Null: none.
  ferry_routing* exchange(int64_t layer, ferry_routing* routing) {
    const std::lock_guard lock(mutex);
    ferry_routing*& place = routings[layer];
    ferry_routing* before = place;
    place = routing;
    return before;
  }
};

Rank* rank_of(int64_t handle) { return reinterpret_cast<Rank*>(handle); }

// Sends the rows of x to the slab [L, C, H] of the ranks that own their experts. XLA needs all shapes beforehand, which
// a slab provides.
ffi::Error dispatch(void* stream, int64_t handle, int64_t layer, int64_t num_experts, ffi::Buffer<ffi::F32> x,
                    ffi::Buffer<ffi::S32> topk_idx, ffi::Buffer<ffi::F32> topk_weights,
                    ffi::ResultBuffer<ffi::F32> slab) {
  Rank* const rank = rank_of(handle);
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
  ferry_status* status = ferry_route(rank->group, &choice, &options, stream, &routing);
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
  status = ferry_dispatch(rank->group, routing, &send, &receive, &how, stream);
  if (status != nullptr) {
    ferry_routing_free(routing);
    return to_error(status);
  }
  ferry_routing_free(rank->exchange(layer, routing));  // frees a routing left by an unfinished program
  return ffi::Error::Success();
}

// Returns the experts' rows to their tokens, summed with the router's weights.
ffi::Error combine(void* stream, int64_t handle, int64_t layer, ffi::Buffer<ffi::F32> slab,
                   ffi::ResultBuffer<ffi::F32> out) {
  Rank* const rank = rank_of(handle);
  ferry_routing* const routing = rank->exchange(layer, nullptr);
  if (routing == nullptr) return ffi::Error::InvalidArgument("a combine without its dispatch: give both one `layer`");
  ferry_combine_input results{};
  results.struct_size = sizeof(results);
  results.x = to_tensor(slab, FERRY_FLOAT32);
  ferry_combine_output sums{};
  sums.struct_size = sizeof(sums);
  sums.x = to_tensor(*out, FERRY_FLOAT32);
  ferry_combine_options options{};
  options.struct_size = sizeof(options);
  options.weighted = 1;
  ferry_status* status = ferry_combine(rank->group, routing, &results, &sums, &options, stream);
  ferry_routing_free(routing);
  return to_error(status);
}

ffi::Error dispatch_on_host(int64_t handle, int64_t layer, int64_t num_experts, ffi::Buffer<ffi::F32> x,
                            ffi::Buffer<ffi::S32> topk_idx, ffi::Buffer<ffi::F32> topk_weights,
                            ffi::ResultBuffer<ffi::F32> slab) {
  return dispatch(nullptr, handle, layer, num_experts, x, topk_idx, topk_weights, slab);
}

ffi::Error combine_on_host(int64_t handle, int64_t layer, ffi::Buffer<ffi::F32> slab, ffi::ResultBuffer<ffi::F32> out) {
  return combine(nullptr, handle, layer, slab, out);
}

// Attributes, arguments and results of the handlers of both platforms.
template <typename Binding>
auto bind_dispatch(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("rank")
      .template Attr<int64_t>("layer")
      .template Attr<int64_t>("num_experts")
      .template Arg<ffi::Buffer<ffi::F32>>()   // x [T, H]
      .template Arg<ffi::Buffer<ffi::S32>>()   // topk_idx [T, K]
      .template Arg<ffi::Buffer<ffi::F32>>()   // topk_weights [T, K]
      .template Ret<ffi::Buffer<ffi::F32>>();  // slab [L, C, H]
}

template <typename Binding>
auto bind_combine(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("rank")
      .template Attr<int64_t>("layer")
      .template Arg<ffi::Buffer<ffi::F32>>()   // slab [L, C, H]
      .template Ret<ffi::Buffer<ffi::F32>>();  // out [T, H]
}

// A CUDA stream, as the C interface takes it.
using Stream = ffi::PlatformStream<void*>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_dispatch_cpu, dispatch_on_host, bind_dispatch(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_combine_cpu, combine_on_host, bind_combine(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_dispatch_cuda, dispatch, bind_dispatch(ffi::Ffi::Bind().Ctx<Stream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferry_jax_combine_cuda, combine, bind_combine(ffi::Ffi::Bind().Ctx<Stream>()));

// Creates this process's rank from the variables of docs/bootstrap.md; with backend "cuda" on that GPU. Returns 0 on
// failure, and prints the reason.
extern "C" FERRY_C_API int64_t ferry_jax_open(const char* backend, int32_t device) {
  ferry_bootstrap* bootstrap = nullptr;
  ferry_group* group = nullptr;
  ferry_group_options options{};
  options.struct_size = sizeof(options);
  options.backend = backend;
  options.use_device = 1;
  options.device = device;
  ferry_status* status = ferry_bootstrap_create_from_environment(0, &bootstrap);
  if (status == nullptr) status = ferry_group_create(bootstrap, &options, &group);
  if (status != nullptr) std::fprintf(stderr, "%s\n", ferry_status_message(status));
  ferry_status_free(status);
  ferry_bootstrap_free(bootstrap);
  if (group == nullptr) return 0;
  Rank* rank = new Rank;
  rank->group = group;
  return reinterpret_cast<int64_t>(rank);
}

// Returns 0 on success. On GPUs errors of kernels are found here.
extern "C" FERRY_C_API int32_t ferry_jax_close(int64_t handle) {
  Rank* const rank = rank_of(handle);
  ferry_status* status = ferry_group_destroy(rank->group);
  const int32_t failed = status == nullptr ? 0 : 1;
  if (status != nullptr) std::fprintf(stderr, "%s\n", ferry_status_message(status));
  ferry_status_free(status);
  for (const auto& [layer, routing] : rank->routings) ferry_routing_free(routing);
  ferry_group_free(rank->group);
  delete rank;
  return failed;
}
