#ifndef FERRY_TESTS_UCX_CARD_HOSTS_HPP
#define FERRY_TESTS_UCX_CARD_HOSTS_HPP

/// Threads and processes that seem to run on different hosts, each with an InfiniBand card. Programs that link this
/// library see them through ferry::this_host and ferry::net_devices, which its linker options replace.

namespace ferry::test {

/// The calling thread runs on this host from now on. Threads that do not call it run on host 0.
void enter_host(int host);

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_HOSTS_HPP
