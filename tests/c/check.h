#ifndef FERRY_TESTS_C_CHECK_H
#define FERRY_TESTS_C_CHECK_H

/// Helpers of the C tests: a failed check prints its name and ends the process with 1.

#include <stddef.h>

#include "ferry/ferry.h"

void expect(int condition, const char* what);
/// Expects an ok status. Frees the status.
void expect_ok(ferry_status* status, const char* what);
/// Expects this code, this rank and this text in the message. Frees the status.
void expect_error(ferry_status* status, int32_t code, int32_t peer, const char* text);

/// Expects this code. Frees the status.
void expect_code(ferry_status* status, int32_t code, const char* what);

/// Contiguous view of [`rows`, `columns`].
ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns);
/// Zeroed memory; ends the process if there is none.
void* memory(size_t num_bytes);

/// Forks `num_ranks` processes, each of which calls `run` with a bootstrap over TCP. Waits until all have ended and
/// returns the number of them that returned 0.
int run_processes(int32_t num_ranks, int (*run)(ferry_bootstrap* bootstrap));

#endif  // FERRY_TESTS_C_CHECK_H
