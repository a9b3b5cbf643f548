#include "cpu/same_process.hpp"

#include <map>
#include <mutex>

namespace ferry::cpu {
namespace {

/// The one thing that ranks of a process share outside their groups, and only while those form. Tokens are random, so
/// groups cannot meet by mistake.
struct Offers {
  std::mutex mutex;
  std::map<LinkToken, std::weak_ptr<ArenaMapping>> by_token;
};

Offers& offers() {
  static Offers instance;
  return instance;
}

}  // namespace

OfferedMapping::OfferedMapping(const LinkToken& token, const std::shared_ptr<ArenaMapping>& mapping) : token_(token) {
  const std::lock_guard lock(offers().mutex);
  offers().by_token[token] = mapping;
}

OfferedMapping::~OfferedMapping() {
  const std::lock_guard lock(offers().mutex);
  offers().by_token.erase(token_);
}

std::shared_ptr<ArenaMapping> find_offered_mapping(const LinkToken& token) {
  const std::lock_guard lock(offers().mutex);
  const auto found = offers().by_token.find(token);
  return found == offers().by_token.end() ? nullptr : found->second.lock();
}

}  // namespace ferry::cpu
