/// Contexts, memory, workers and endpoints of the stand-in card.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "ucx_card/card.hpp"
#include "ucx_card/progress.hpp"

namespace ferry::ucx_card {
namespace {

/// Worker's address and memory's key, as peers receive them.
struct Packed {
  std::uint64_t magic = 0;
  std::uint64_t process = 0;
  std::uint64_t id = 0;
  std::uint64_t is_shared = 0;  ///< a key to memory that processes of this host map
  std::uint64_t is_gpu = 0;     ///< a key to memory of a GPU
};
constexpr std::uint64_t kAddressMagic = 0x7264'6461'6472'6163;
constexpr std::uint64_t kKeyMagic = 0x2079'656b'6472'6163;

/// True if the list names any of these transports.
bool lists(std::string_view transports, std::initializer_list<std::string_view> names) {
  while (!transports.empty()) {
    const std::size_t end = std::min(transports.find(','), transports.size());
    const std::string_view item = transports.substr(0, end);
    if (std::ranges::any_of(names, [item](std::string_view name) { return item.starts_with(name); })) return true;
    transports.remove_prefix(std::min(end + 1, transports.size()));
  }
  return false;
}

/// Connections that the configuration asks for: UCX makes IB_NUM_PATHS, and puts use MAX_RMA_RAILS of them.
std::uint64_t num_paths_of(const ucp_config& config) {
  const auto number = [&config](const char* name) -> std::uint64_t {
    const auto found = config.values.find(name);
    return found == config.values.end() ? 1 : std::strtoull(found->second.c_str(), nullptr, 10);
  };
  return std::max<std::uint64_t>(1, std::min(number("IB_NUM_PATHS"), number("MAX_RMA_RAILS")));
}

Packed unpack(const void* bytes) {
  Packed packed;
  std::memcpy(&packed, bytes, sizeof packed);
  return packed;
}

/// Fills the output of a call that fails with garbage: UCX promises nothing about it.
template <typename Handle>
ucs_status_t failed(ucs_status_t status, Handle* output) {
  *output = reinterpret_cast<Handle>(std::uintptr_t{0xdead});
  return status;
}

void* pack(const Packed& packed, std::size_t* num_bytes) {
  void* bytes = std::malloc(sizeof packed);
  std::memcpy(bytes, &packed, sizeof packed);
  *num_bytes = sizeof packed;
  return bytes;
}

}  // namespace
}  // namespace ferry::ucx_card

using ferry::ucx_card::Call;
using ferry::ucx_card::Card;
using ferry::ucx_card::End;
using ferry::ucx_card::Packed;

extern "C" {

void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  // The newest UCX that Ferry runs with, whatever headers this library is compiled with.
  *major = 1;
  *minor = 22;
  *release = 0;
}

ucs_status_t ucp_config_read(const char* /*prefix*/, const char* /*file*/, ucp_config_t** config) {
  const char* transports = std::getenv("UCX_TLS");
  *config = new ucp_config{transports != nullptr ? transports : "all", {}};
  return UCS_OK;
}

ucs_status_t ucp_config_modify(ucp_config_t* config, const char* name, const char* value) {
  if (std::string_view(name) == "TLS") config->transports = value;
  config->values[name] = value;
  return UCS_OK;
}

/// For tests: the value that the last context with cards was given for a setting; null if none.
const char* ferry_ucx_card_configured(const char* name) { return Card::instance().configured(name); }

void ucp_config_release(ucp_config_t* config) { delete config; }

ucs_status_t ucp_init_version(unsigned /*major*/, unsigned /*minor*/, const ucp_params_t* params,
                              const ucp_config_t* config, ucp_context_h* context) {
  using ferry::ucx_card::lists;
  auto created = std::make_unique<ucp_context>();
  created->settings = ferry::ucx_card::Settings::from_environment();
  created->has_cards = lists(config->transports, {"rc", "dc", "ib"});
  created->has_gpu_memory = lists(config->transports, {"cuda"});
  created->has_shared_memory = lists(config->transports, {"posix"});
  created->may_write = (params->features & UCP_FEATURE_RMA) != 0;
  created->num_paths = ferry::ucx_card::num_paths_of(*config);
  Card& card = Card::instance();
  if (created->has_cards) card.set_configured(config->values);
  card.add_context(created.get());
  const ucs_status_t status = created->next(Call::kInit);
  if (status != UCS_OK) {
    card.remove_context(created.get());
    return ferry::ucx_card::failed(status, context);
  }
  *context = created.release();
  return UCS_OK;
}

void ucp_cleanup(ucp_context_h context) {
  Card::instance().remove_context(context);
  delete context;
}

ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
  attributes->memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST);
  if (context->has_gpu_memory) attributes->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  return UCS_OK;
}

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t* params, ucp_mem_h* memory) {
  auto mapped = std::make_shared<ucp_mem>();
  mapped->context = context;
  mapped->num_bytes = params->length;
  if ((params->field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE) != 0) mapped->type = params->memory_type;
  const bool is_gpu = mapped->type == UCS_MEMORY_TYPE_CUDA;
  if (is_gpu && !context->has_gpu_memory) return ferry::ucx_card::failed(UCS_ERR_UNSUPPORTED, memory);
  if ((params->field_mask & UCP_MEM_MAP_PARAM_FIELD_ADDRESS) != 0) {
    mapped->address = static_cast<std::byte*>(params->address);
  } else {
    constexpr std::size_t kAlignment = 4096;
    mapped->allocated = std::make_unique<std::byte[]>(params->length + kAlignment);
    void* begin = mapped->allocated.get();
    std::size_t room = params->length + kAlignment;
    mapped->address = static_cast<std::byte*>(std::align(kAlignment, params->length, begin, room));
  }
  if (is_gpu && context->settings.gpu != 0) {
    const std::unique_lock lock = context->end->enter();
    if (context->copies == nullptr) {
      context->copies = ferry::ucx_card::GpuCopies::create();
      context->end->use(context->copies.get());
    }
    const ucs_status_t status =
        context->copies != nullptr ? context->copies->share(mapped->address) : UCS_ERR_UNSUPPORTED;
    if (status != UCS_OK) return ferry::ucx_card::failed(status, memory);
  }
  if (const ucs_status_t status = context->next(is_gpu ? Call::kMapGpu : Call::kMap); status != UCS_OK) {
    if (is_gpu && context->copies != nullptr) context->copies->forget(mapped->address);
    return ferry::ucx_card::failed(status, memory);
  }
  mapped->key = Card::instance().new_id();
  *memory = mapped.get();
  Card::instance().add(std::move(mapped));
  return UCS_OK;
}

ucs_status_t ucp_mem_query(const ucp_mem_h memory, ucp_mem_attr_t* attributes) {
  attributes->address = memory->address;
  attributes->length = memory->num_bytes;
  return UCS_OK;
}

ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memory) {
  // They may read from it.
  context->end->finish_copies();
  std::byte* const address = memory->address;
  const bool is_shared = memory->type == UCS_MEMORY_TYPE_CUDA && context->copies != nullptr;
  Card::instance().remove(memory);
  if (is_shared) context->copies->forget(address);
  return UCS_OK;
}

ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memory, void** buffer, size_t* num_bytes) {
  if (const ucs_status_t status = context->next(Call::kPack); status != UCS_OK) {
    return ferry::ucx_card::failed(status, buffer);
  }
  *buffer = ferry::ucx_card::pack({.magic = ferry::ucx_card::kKeyMagic,
                                   .process = Card::instance().process(),
                                   .id = memory->key,
                                   .is_shared = memory->allocated != nullptr,
                                   .is_gpu = memory->type == UCS_MEMORY_TYPE_CUDA},
                                  num_bytes);
  return UCS_OK;
}

void ucp_rkey_buffer_release(void* buffer) { std::free(buffer); }

ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h endpoint, const void* buffer, ucp_rkey_h* key) {
  const Packed packed = ferry::ucx_card::unpack(buffer);
  if (packed.magic != ferry::ucx_card::kKeyMagic) return UCS_ERR_INVALID_PARAM;
  ucp_context* context = endpoint->worker->context;
  if (const ucs_status_t status = context->next(Call::kUnpack); status != UCS_OK) {
    return ferry::ucx_card::failed(status, key);
  }
  Card& card = Card::instance();
  const bool is_here = packed.process == card.process();
  const bool may_store = packed.is_shared != 0 && context->has_shared_memory && is_here;
  *key = new ucp_rkey{packed.id, may_store, packed.is_gpu != 0, is_here ? card.find_memory(packed.id) : nullptr};
  return UCS_OK;
}

ucs_status_t ucp_rkey_ptr(ucp_rkey_h key, uint64_t remote, void** local) {
  if (!key->may_store) return UCS_ERR_UNSUPPORTED;
  *local = reinterpret_cast<void*>(static_cast<std::uintptr_t>(remote));
  return UCS_OK;
}

void ucp_rkey_destroy(ucp_rkey_h key) { delete key; }

ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t* /*params*/, ucp_worker_h* worker) {
  const int event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  ucs_status_t status = context->next(Call::kWorker);
  if (event_fd < 0) status = UCS_ERR_IO_ERROR;
  if (status != UCS_OK) {
    if (event_fd >= 0) ::close(event_fd);
    return ferry::ucx_card::failed(status, worker);
  }
  Card& card = Card::instance();
  auto created = std::make_unique<ucp_worker>();
  created->context = context;
  created->port = std::make_shared<ferry::ucx_card::Port>(context->end, context, card.new_id(), event_fd);
  card.add(created->port);
  const std::unique_lock lock = context->end->enter();
  context->end->add(created.get());
  *worker = created.release();
  return UCS_OK;
}

void ucp_worker_destroy(ucp_worker_h worker) {
  End& end = *worker->context->end;
  {
    const std::unique_lock lock = end.enter();
    for (const auto& endpoint : worker->endpoints) end.close(endpoint.get());
    for (const auto& close : worker->closes) {
      worker->port->tell({.request = std::exchange(close->request, nullptr), .status = UCS_ERR_CANCELED});
    }
    worker->closes.clear();
  }
  ferry::ucx_card::drain(worker);
  worker->port->close();
  Card::instance().remove(*worker->port);
  const std::unique_lock lock = end.enter();
  end.remove(worker);
  delete worker;
}

ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t** address, size_t* num_bytes) {
  *address = static_cast<ucp_address_t*>(ferry::ucx_card::pack(
      {.magic = ferry::ucx_card::kAddressMagic, .process = Card::instance().process(), .id = worker->port->id()},
      num_bytes));
  return UCS_OK;
}

void ucp_worker_release_address(ucp_worker_h /*worker*/, ucp_address_t* address) { std::free(address); }

ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int* fd) {
  *fd = worker->port->event_fd();
  return UCS_OK;
}

ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t* handler) {
  worker->receive = handler->cb;
  worker->receiver = handler->arg;
  return UCS_OK;
}

ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* endpoint) {
  const Packed packed = ferry::ucx_card::unpack(params->address);
  if (packed.magic != ferry::ucx_card::kAddressMagic) return UCS_ERR_INVALID_ADDR;
  if (const ucs_status_t status = worker->context->next(Call::kEndpoint); status != UCS_OK) {
    return ferry::ucx_card::failed(status, endpoint);
  }
  Card& card = Card::instance();
  const bool is_here = packed.process == card.process();
  auto created = std::make_shared<ucp_ep>();
  created->worker = worker;
  created->end = worker->context->end;
  created->process = packed.process;
  created->target = packed.id;
  created->on_failure = params->err_handler.cb;
  created->failure_argument = params->err_handler.arg;
  const std::unique_lock lock = created->end->enter();
  worker->endpoints.insert(created);
  if (is_here) created->peer = card.find_port(packed.id);
  const bool is_there = is_here ? created->peer != nullptr : card.connect(packed.process);
  if (!is_there) created->end->fail_later(created.get(), UCS_ERR_ENDPOINT_TIMEOUT);
  *endpoint = created.get();
  return UCS_OK;
}

void ucp_ep_print_info(const ucp_ep_h endpoint, FILE* stream) {
  const ucp_context& context = *endpoint->worker->context;
  std::fputs("#\n# UCP endpoint \n#\n#               peer: a stand-in for a card\n", stream);
  if (context.has_cards && context.settings.cards > 0) {
    int lane = 0;
    for (std::uint64_t card = 0; card < context.settings.cards; ++card)
      for (std::uint64_t path = 0; path < context.num_paths; ++path, ++lane) {
        std::fprintf(stream,
                     "#                 lane[%d]:  %d:rc_mlx5/mlx5_%d:1.%d md[1]    -> md[1]/ib/sysdev[255] %s\n", lane,
                     static_cast<int>(card), static_cast<int>(card), static_cast<int>(path),
                     lane == 0 ? "rma am am_bw#0 wireup" : "rma_bw#1 am_bw#1");
      }
  } else if (context.has_shared_memory) {
    std::fputs("#                 lane[0]:  0:posix/memory.0 md[0]    -> md[0]/posix/sysdev[255] rma am wireup\n",
               stream);
  } else {
    std::fputs("#                 lane[0]:  0:tcp/lo.0 md[0]    -> md[0]/tcp/sysdev[255] am wireup\n", stream);
  }
}

}  // extern "C"
