#ifndef FERRY_NODE_PAUSE_CORE_HPP
#define FERRY_NODE_PAUSE_CORE_HPP

namespace ferry::node {

/// Pause between two polls of a word of memory: lets the core's other thread run, and keeps the loop from filling the
/// pipeline with loads (Intel SDM volume 2, PAUSE: about 140 cycles since Skylake; Arm ARM, YIELD).
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace ferry::node

#endif  // FERRY_NODE_PAUSE_CORE_HPP
