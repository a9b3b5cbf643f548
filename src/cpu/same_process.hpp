#ifndef FERRY_CPU_SAME_PROCESS_HPP
#define FERRY_CPU_SAME_PROCESS_HPP

/// Hands a mapping from one thread of this process to another while a group forms. A rank that gives up takes its entry
/// away; a peer that comes later then finds nothing, instead of an object that is gone.

#include <memory>

#include "cpu/arena.hpp"
#include "cpu/peer_link.hpp"

namespace ferry::cpu {

/// Makes `mapping` findable under `token` as long as this object lives.
class OfferedMapping {
 public:
  OfferedMapping(const LinkToken& token, const std::shared_ptr<ArenaMapping>& mapping);
  OfferedMapping(const OfferedMapping&) = delete;
  OfferedMapping& operator=(const OfferedMapping&) = delete;
  ~OfferedMapping();

 private:
  LinkToken token_;
};

/// What another thread offers under `token`; null if nothing (any more).
std::shared_ptr<ArenaMapping> find_offered_mapping(const LinkToken& token);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_SAME_PROCESS_HPP
