#include "node/same_process.hpp"

#include <map>
#include <mutex>
#include <utility>

namespace ferry::node {
namespace {

/// The only state that ranks of a process share outside their groups, and only while groups are created. Tokens are
/// random, so groups cannot be confused.
struct Offers {
  std::mutex mutex;
  std::map<std::pair<std::type_index, LinkToken>, std::weak_ptr<void>> by_key;
};

Offers& offers() {
  static Offers instance;
  return instance;
}

}  // namespace

void add_offer(std::type_index type, const LinkToken& token, const std::shared_ptr<void>& object) {
  const std::lock_guard lock(offers().mutex);
  offers().by_key[{type, token}] = object;
}

void remove_offer(std::type_index type, const LinkToken& token) {
  const std::lock_guard lock(offers().mutex);
  offers().by_key.erase({type, token});
}

std::shared_ptr<void> find_offer(std::type_index type, const LinkToken& token) {
  const std::lock_guard lock(offers().mutex);
  const auto found = offers().by_key.find({type, token});
  return found == offers().by_key.end() ? nullptr : found->second.lock();
}

}  // namespace ferry::node
