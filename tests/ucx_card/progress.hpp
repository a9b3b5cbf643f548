#ifndef FERRY_TESTS_UCX_CARD_PROGRESS_HPP
#define FERRY_TESTS_UCX_CARD_PROGRESS_HPP

#include "ucx_card/objects.hpp"

namespace ferry::ucx_card {

/// Completes requests that the worker still has news of; messages and failures are dropped.
void drain(ucp_worker* worker);

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_PROGRESS_HPP
