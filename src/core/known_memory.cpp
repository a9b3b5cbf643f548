#include "ferry/known_memory.hpp"

namespace ferry {
namespace {

thread_local int depth = 0;

}  // namespace

KnownMemory::KnownMemory() { ++depth; }

KnownMemory::~KnownMemory() { --depth; }

bool KnownMemory::here() { return depth > 0; }

}  // namespace ferry
