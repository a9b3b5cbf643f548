#ifndef FERRY_NODE_SAME_PROCESS_HPP
#define FERRY_NODE_SAME_PROCESS_HPP

/// Handover of an object from one thread of this process to another while a group forms. A rank that gives up removes
/// its entry; a later peer then finds nothing instead of a dead object.

#include <memory>
#include <typeindex>
#include <typeinfo>

#include "node/arena.hpp"
#include "node/peer_link.hpp"

namespace ferry::node {

/// Offers are keyed by type and token: a peer that sends a wrong token cannot pass one object off as another.
void add_offer(std::type_index type, const LinkToken& token, const std::shared_ptr<void>& object);
void remove_offer(std::type_index type, const LinkToken& token);
std::shared_ptr<void> find_offer(std::type_index type, const LinkToken& token);

/// Makes `object` findable under `token` as long as this object lives.
template <typename Object>
class Offered {
 public:
  Offered(const LinkToken& token, const std::shared_ptr<Object>& object) : token_(token) {
    add_offer(typeid(Object), token, object);
  }
  Offered(const Offered&) = delete;
  Offered& operator=(const Offered&) = delete;
  ~Offered() { remove_offer(typeid(Object), token_); }

 private:
  LinkToken token_;
};

/// Object that another thread offers under `token`; null if there is none, or no longer.
template <typename Object>
std::shared_ptr<Object> find_offered(const LinkToken& token) {
  return std::static_pointer_cast<Object>(find_offer(typeid(Object), token));
}

using OfferedMapping = Offered<ArenaMapping>;
inline std::shared_ptr<ArenaMapping> find_offered_mapping(const LinkToken& token) {
  return find_offered<ArenaMapping>(token);
}

}  // namespace ferry::node

#endif  // FERRY_NODE_SAME_PROCESS_HPP
