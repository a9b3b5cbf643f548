#ifndef FERRY_NODE_SERVICE_THREAD_HPP
#define FERRY_NODE_SERVICE_THREAD_HPP

#include <functional>
#include <string_view>
#include <thread>

#include "ferry/status.hpp"

namespace ferry::node {

/// Starts a thread of the library's own. It has a name that tools show (at most 15 characters) and takes no signals,
/// which are left to the program's threads.
/// @errors kSystem: no thread could be started; `what` names its purpose
Result<std::thread> start_service_thread(const char* name, std::string_view what, std::function<void()> body);

}  // namespace ferry::node

#endif  // FERRY_NODE_SERVICE_THREAD_HPP
