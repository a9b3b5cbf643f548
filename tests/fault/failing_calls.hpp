#ifndef FERRY_TESTS_FAULT_FAILING_CALLS_HPP
#define FERRY_TESTS_FAULT_FAILING_CALLS_HPP

/// Functions of the C library and operator new, replaced in a test program so that the n-th call of one fails. Calls of
/// UCX are neither counted nor failed.

#include <string_view>

namespace ferry::test {

enum class FailingCall {
  kPthreadCreate,
  kNew,
  kMmap,
  kMemfdCreate,
  kFtruncate,
  kSocket,
  kBind,
  kListen,
  kConnect,
  kAccept4,
  kGetsockopt,
  kSendmsg,
  kRecvmsg,
  kPoll,
  kPpoll,
  kEventfd,
  kEpollCreate1,
  kEpollCtl,
  kFcntl,
  kGetrandom,
  kGetifaddrs,
  kStatvfs,
  kNumCalls
};

std::string_view name_of(FailingCall call);

/// The n-th of the calls that this thread makes from now on fails; n counts from 1.
void fail_call(FailingCall call, int n);
/// No call fails any more. True if one has failed since fail_call.
bool stop_failing();

}  // namespace ferry::test

#endif  // FERRY_TESTS_FAULT_FAILING_CALLS_HPP
