#include "ucx_card/card.hpp"

#include <utility>
#include <vector>

#include "ucx_card/memory.hpp"

ucs_status_t ucp_context::next(ferry::ucx_card::Call call) {
  const auto index = static_cast<std::size_t>(call);
  const std::uint64_t number_of_call = ++num_calls[index];
  const bool is_this_end = settings.end == ferry::ucx_card::Settings::kEveryEnd || settings.end == number;
  if (!is_this_end || settings.fail != index || settings.fail_at != number_of_call) return UCS_OK;
  return static_cast<ucs_status_t>(-static_cast<int>(settings.status));
}

namespace ferry::ucx_card {

Card& Card::instance() {
  static Card& card = *new Card;
  return card;
}

void Card::add_context(ucp_context* context) {
  const std::lock_guard life(life_mutex_);
  context->number = num_created_++;
  context->random.seed(context->settings.seed * 1000 + context->number);
  context->end = std::make_shared<End>(*context);
  {
    const std::lock_guard lock(mutex_);
    ends_.insert(context->end);
  }
  if (num_contexts_++ > 0) return;
  is_stopping_ = false;
  wires_.open(
      {.received = [this](int wire, const Frame& frame, Wires::Payload payload) { receive(wire, frame, payload); },
       .lost = [this](std::uint64_t process) { tell_all_ends({.process = process}); }});
  thread_ = std::thread([this] { run(); });
}

void Card::remove_context(ucp_context* context) {
  const std::lock_guard life(life_mutex_);
  context->end->stop();
  {
    const std::unique_lock lock = context->end->enter();
    context->copies.reset();
    context->end->use(nullptr);
  }
  std::vector<Asked> dropped;
  {
    const std::lock_guard lock(mutex_);
    ends_.erase(context->end);
    for (auto asked = asked_.begin(); asked != asked_.end();) {
      const bool is_its_own = asked->second.endpoint->end == context->end;
      if (is_its_own) dropped.push_back(std::move(asked->second));
      asked = is_its_own ? asked_.erase(asked) : std::next(asked);
    }
  }
  context->end->clear();
  if (--num_contexts_ > 0) return;
  num_created_ = 0;
  is_stopping_ = true;
  wires_.wake();
  thread_.join();
  wires_.close();
}

void Card::run() {
  while (!is_stopping_) wires_.wait();
}

void Card::add(const std::shared_ptr<Port>& port) {
  const std::lock_guard lock(mutex_);
  ports_[port->id()] = port;
}

void Card::remove(const Port& port) {
  {
    const std::lock_guard lock(mutex_);
    ports_.erase(port.id());
  }
  tell_all_ends({.process = process(), .target = port.id()});
  wires_.send_to_all({.kind = FrameKind::kGone, .from = port.id()});
}

void Card::add(std::shared_ptr<ucp_mem> memory) {
  const std::lock_guard lock(mutex_);
  memory_[memory->key] = std::move(memory);
}

void Card::remove(ucp_mem* memory) {
  std::shared_ptr<ucp_mem> removed = find_memory(memory->key);
  // By copies of other ends, too, whose owners may not come back before this returns.
  removed->end_all_uses([this] { poll_all_copies(); });
  removed->allocated.reset();
  const std::lock_guard lock(mutex_);
  memory_.erase(removed->key);
}

std::shared_ptr<Port> Card::find_port(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = ports_.find(id);
  return found == ports_.end() ? nullptr : found->second;
}

std::shared_ptr<ucp_mem> Card::find_memory(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  const auto found = memory_.find(key);
  return found == memory_.end() ? nullptr : found->second;
}

void Card::set_configured(std::map<std::string, std::string> values) {
  const std::lock_guard lock(mutex_);
  configured_ = std::move(values);
}

const char* Card::configured(const char* name) {
  const std::lock_guard lock(mutex_);
  const auto found = configured_.find(name);
  return found == configured_.end() ? nullptr : found->second.c_str();
}

void Card::tell_all_ends(const Departure& departure) {
  std::set<std::shared_ptr<End>> ends;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, port] : ports_) ends.insert(port->end());
  }
  for (const auto& end : ends) end->tell(departure);
}

void Card::poll_all_copies() {
  std::set<std::shared_ptr<End>> ends;
  {
    const std::lock_guard lock(mutex_);
    ends = ends_;
  }
  for (const auto& end : ends) end->poll_copies();
}

bool Card::ask(Frame frame, Wires::Payload payload, Asked asked) {
  const std::uint64_t process = asked.endpoint->process;
  {
    // The answer may come before this returns.
    const std::lock_guard lock(mutex_);
    frame.ticket = ++last_ticket_;
    asked_[frame.ticket] = std::move(asked);
  }
  if (wires_.send(process, frame, payload)) return true;
  const std::lock_guard lock(mutex_);
  asked_.erase(frame.ticket);
  return false;
}

void Card::receive(int wire, const Frame& frame, Wires::Payload payload) {
  const Range range{frame.remote, frame.num_bytes, frame.begin, frame.end};
  Frame answer{.kind = FrameKind::kAnswer, .ticket = frame.ticket};
  switch (frame.kind) {
    case FrameKind::kWrite:
      answer.status = write_memory(find_port(frame.worker).get(), find_memory(frame.key).get(), range, payload.data());
      wires_.answer(wire, answer);
      break;
    case FrameKind::kRead: {
      std::vector<std::byte> bytes(range.end - range.begin);
      answer.status = read_memory(find_port(frame.worker).get(), find_memory(frame.key).get(), range, bytes.data());
      wires_.answer(wire, answer, bytes);
      break;
    }
    case FrameKind::kMessage:
      answer.status = take_message(frame, payload);
      wires_.answer(wire, answer);
      break;
    case FrameKind::kClosed:
      if (const auto port = find_port(frame.worker)) {
        port->end()->tell({.worker = frame.worker, .process = frame.process, .target = frame.from});
      }
      break;
    case FrameKind::kGone:
      tell_all_ends({.process = frame.process, .target = frame.from});
      break;
    case FrameKind::kAnswer:
      take_answer(frame, payload);
      break;
  }
}

ucs_status_t Card::take_message(const Frame& frame, Wires::Payload payload) {
  const std::shared_ptr<Port> port = find_port(frame.worker);
  auto message = std::make_shared<Operation>();
  message->call = Call::kMessage;
  message->header_bytes = frame.header_bytes;
  message->num_bytes = payload.size() - frame.header_bytes;
  message->copied.assign(payload.begin(), payload.end());
  return port != nullptr && port->tell({.message = std::move(message)}) ? UCS_OK : UCS_ERR_ENDPOINT_TIMEOUT;
}

void Card::take_answer(const Frame& frame, Wires::Payload payload) {
  Asked asked;
  {
    const std::lock_guard lock(mutex_);
    const auto found = asked_.find(frame.ticket);
    if (found == asked_.end()) return;
    asked = std::move(found->second);
    asked_.erase(found);
  }
  asked.endpoint->end->take_answer(asked.endpoint, asked.operation.get(), asked.begin, frame.status, payload);
}

}  // namespace ferry::ucx_card
