#include "net/loopback/inbox.hpp"

#include <map>
#include <utility>

namespace ferry::net::loopback {
namespace {

struct Offers {
  std::mutex mutex;
  std::map<Token, std::weak_ptr<Inbox>> by_token;
};

Offers& offers() {
  static Offers instance;
  return instance;
}

}  // namespace

void Inbox::post(Operation operation) {
  {
    const std::lock_guard lock(mutex_);
    if (shut_) return;
    operations_.push_back(std::move(operation));
    if (operations_.size() > 1) return;  // the sender of the first has woken the owner
  }
  wake_.signal();
}

void Inbox::shut() {
  const std::lock_guard lock(mutex_);
  shut_ = true;
  operations_.clear();
}

std::vector<Operation> Inbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(operations_, {});
}

bool Inbox::empty() const {
  const std::lock_guard lock(mutex_);
  return operations_.empty();
}

void offer_inbox(const Token& token, const std::shared_ptr<Inbox>& inbox) {
  const std::lock_guard lock(offers().mutex);
  offers().by_token[token] = inbox;
}

std::shared_ptr<Inbox> find_inbox(const Token& token) {
  const std::lock_guard lock(offers().mutex);
  const auto found = offers().by_token.find(token);
  return found == offers().by_token.end() ? nullptr : found->second.lock();
}

void withdraw_inbox(const Token& token) {
  const std::lock_guard lock(offers().mutex);
  offers().by_token.erase(token);
}

void wake_all_ends() {
  const std::lock_guard lock(offers().mutex);
  for (const auto& [token, offered] : offers().by_token) {
    if (const std::shared_ptr<Inbox> inbox = offered.lock()) inbox->wake().signal();
  }
}

}  // namespace ferry::net::loopback
