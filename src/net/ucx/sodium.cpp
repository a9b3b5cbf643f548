#include "net/ucx/sodium.hpp"

#include <dlfcn.h>

namespace ferry::net::ucx {
namespace {

/// Newest first; the function is the same in both.
constexpr const char* kLibraryNames[] = {"libsodium.so.26", "libsodium.so.23"};

SodiumSipHash load() noexcept {
  for (const char* name : kLibraryNames) {
    // Never unloaded: connections keep the function.
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) continue;
    // libsodium must be initialised first. sodium_init returns 1 if it was initialised before.
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "sodium_init"));
    const auto hash = reinterpret_cast<SodiumSipHash>(dlsym(library, "crypto_shorthash_siphashx24"));
    if (init != nullptr && hash != nullptr && init() >= 0) return hash;
  }
  return nullptr;
}

}  // namespace

SodiumSipHash sodium_siphash() noexcept {
  static const SodiumSipHash hash = load();
  return hash;
}

}  // namespace ferry::net::ucx
