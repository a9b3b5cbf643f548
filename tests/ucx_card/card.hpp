#ifndef FERRY_TESTS_UCX_CARD_CARD_HPP
#define FERRY_TESTS_UCX_CARD_CARD_HPP

/// State shared by the ends of this process: how they find each other, and the ends of other processes.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "ucx_card/end.hpp"
#include "ucx_card/objects.hpp"
#include "ucx_card/wires.hpp"

namespace ferry::ucx_card {

/// A request to the card of another process.
struct Asked {
  std::shared_ptr<ucp_ep> endpoint;
  std::shared_ptr<Operation> operation;
  std::size_t begin = 0;
};

class Card {
 public:
  /// Never destroyed.
  static Card& instance();

  /// Makes the context's end. The thread that waits for other processes lives from the first context of the process to
  /// the last one.
  void add_context(ucp_context* context);
  void remove_context(ucp_context* context);
  std::uint64_t new_id() { return ++last_id_; }
  std::uint64_t process() const { return wires_.process(); }

  void add(const std::shared_ptr<Port>& port);
  /// Endpoints to its worker fail, and no operation finds the port any more.
  void remove(const Port& port);
  void add(std::shared_ptr<ucp_mem> memory);
  /// Returns once no card uses the memory.
  void remove(ucp_mem* memory);
  // Null if there is none in this process.
  std::shared_ptr<Port> find_port(std::uint64_t id);
  std::shared_ptr<ucp_mem> find_memory(std::uint64_t key);

  /// Settings of the last context that has cards.
  void set_configured(std::map<std::string, std::string> values);
  /// Null if it was not given.
  const char* configured(const char* name);

  // To other processes. False: it is not there.
  bool connect(std::uint64_t process) { return wires_.connect(process); }
  bool send(std::uint64_t process, const Frame& frame) { return wires_.send(process, frame); }
  /// Sends a request, whose answer finishes a step of the operation.
  bool ask(Frame frame, Wires::Payload payload, Asked asked);

 private:
  void run();
  void receive(int wire, const Frame& frame, Wires::Payload payload);
  ucs_status_t take_message(const Frame& frame, Wires::Payload payload);
  void take_answer(const Frame& frame, Wires::Payload payload);
  void tell_all_ends(const Departure& departure);
  void poll_all_copies();

  std::mutex life_mutex_;
  std::uint64_t num_contexts_ = 0;
  std::uint64_t num_created_ = 0;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
  Wires wires_;
  std::atomic<std::uint64_t> last_id_{0};
  std::mutex mutex_;                     // guards the members below
  std::set<std::shared_ptr<End>> ends_;  // of all contexts
  std::map<std::uint64_t, std::shared_ptr<Port>> ports_;
  std::map<std::uint64_t, std::shared_ptr<ucp_mem>> memory_;
  std::map<std::string, std::string> configured_;
  std::uint64_t last_ticket_ = 0;
  std::map<std::uint64_t, Asked> asked_;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_CARD_HPP
