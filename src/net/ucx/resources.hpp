#ifndef FERRY_NET_UCX_RESOURCES_HPP
#define FERRY_NET_UCX_RESOURCES_HPP

/// The UCX objects for one scope of an end: a context, its registered memory, a worker, and the descriptor that wakes
/// it.

#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "net/engine.hpp"
#include "net/ucx/library.hpp"
#include "net/ucx/ports.hpp"
#include "net/ucx/setup.hpp"

namespace ferry::net::ucx {

/// Checks that this UCX can do with its cards as they are told.
/// @errors kUnsupported
Status check_card_settings(const Library& library, const CardSettings& cards);

class Resources {
 public:
  struct Params {
    Scope scope = Scope::kNetwork;
    std::string devices{};              ///< for scope kNetwork: EngineOptions::net_devices
    std::size_t num_peers = 0;          ///< in this scope
    std::span<std::byte> memory{};      ///< memory that peers put into
    std::size_t memory_bytes = 0;       ///< size to allocate if `memory` is empty
    std::span<std::byte> gpu_memory{};  ///< EngineOptions::gpu_memory
    CardSettings cards{};               ///< for scope kNetwork: EngineOptions::cards
    bool cards_keep_order = false;      ///< EngineOptions::cards_keep_order
  };

  /// Creates the objects from UCX's own variables and, for those not set, this engine's settings (setup.hpp).
  /// @errors kInvalidArgument: a variable has a value that UCX refuses; kSystem: too few descriptors, or too little
  ///         shared memory; kTransport, kUnsupported
  static Result<std::unique_ptr<Resources>> create(const Library& library, const Params& params);
  /// Maximum number of file descriptors that it needs.
  static std::size_t num_descriptors(Scope scope, std::size_t num_peers);
  /// Resources of a receiver: no memory, TCP only, the devices of `of`, for puts that `num_peers` peers send as
  /// messages.
  /// @errors as create
  static Result<std::unique_ptr<Resources>> create_receiver(const Resources& of, std::size_t num_peers);
  /// Runs after the last connection is closed.
  ~Resources();
  Resources(const Resources&) = delete;
  Resources& operator=(const Resources&) = delete;

  /// Makes UCX call `receive` with `argument` and each message.
  Status listen(ucp_am_recv_callback_t receive, void* argument);

  const Library& library() const { return library_; }
  /// Settings that this context has given to network cards, without those that UCX's variables override.
  const CardSettings& card_settings() const { return cards_; }
  ucp_worker_h worker() const { return worker_; }
  std::span<std::byte> memory() const { return memory_; }
  ucp_mem_h memory_handle() const { return mapped_; }
  int event_fd() const { return event_fd_; }
  /// Setup::remote_writes.
  bool remote_writes() const { return setup_.remote_writes; }
  /// True if peers may put by messages over TCP and there is a port for a receiver.
  bool may_receive_puts() const;
  /// Address with which peers reach the worker, and the key to its memory (empty if there is no memory).
  const std::vector<std::byte>& address() const { return address_; }
  const std::vector<std::byte>& remote_key() const { return remote_key_; }
  /// The same for GPU memory: no handle and no key if peers' cards cannot write there.
  std::span<std::byte> gpu_memory() const { return gpu_memory_; }
  ucp_mem_h gpu_memory_handle() const { return gpu_mapped_; }
  const std::vector<std::byte>& gpu_key() const { return gpu_key_; }
  /// Call after all peers have connected with the named sockets.
  void stop_listening(const std::set<SocketName>& known_ends) { listeners_.close(known_ends); }

 private:
  Resources(const Library& library, Setup setup, const Params& params);
  static Result<std::unique_ptr<Resources>> create(const Library& library, const Params& params, const Setup& setup);
  Status open_context();
  Status map_memory(std::size_t memory_bytes);
  Status map_gpu_memory();
  Status pack_key(ucp_mem_h mapped, std::vector<std::byte>* key);
  Status find_allocated();
  Status open_worker();

  const Library& library_;
  Setup setup_;
  CardSettings cards_;
  bool cards_keep_order_;
  std::span<std::byte> memory_;
  std::span<std::byte> gpu_memory_;
  ucp_context_h context_ = nullptr;
  ucp_mem_h mapped_ = nullptr;
  ucp_mem_h gpu_mapped_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
  std::vector<std::byte> remote_key_;
  std::vector<std::byte> gpu_key_;
  Listeners listeners_;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_RESOURCES_HPP
