#ifndef FERRY_CPU_CONTEXT_CONTEXT_HPP
#define FERRY_CPU_CONTEXT_CONTEXT_HPP

#include <memory>

#include "call/call_sync.hpp"
#include "cpu/context/spare_tables.hpp"
#include "cpu/context/staging.hpp"

namespace ferry::cpu {

/// Parts of the backend that a call uses.
struct Context {
  call::CallSync& sync;
  Staging& staging;
  const std::shared_ptr<SpareTables>& spare_tables;
  bool verify = false;  ///< GroupOptions::verify

  node::Peers& peers() const { return sync.peers(); }
  const Topology& topology() const { return sync.topology(); }
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_CONTEXT_HPP
