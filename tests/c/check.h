#ifndef FERRY_TESTS_C_CHECK_H
#define FERRY_TESTS_C_CHECK_H

/// What the C tests share: a failed check says what it was and ends the process with 1.

#include <stddef.h>

#include "ferry/ferry.h"

void expect(int condition, const char* what);
/// Frees the status.
void expect_ok(ferry_status* status, const char* what);
/// Of this code, about this rank, with this text in its message. Frees the status.
void expect_error(ferry_status* status, int32_t code, int32_t peer, const char* text);

/// Of this code. Frees the status.
void expect_code(ferry_status* status, int32_t code, const char* what);

/// A contiguous view; `rows` of `columns`.
ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns);
/// malloc that does not fail.
void* memory(size_t num_bytes);

/// Forks `num_ranks` processes; each calls `run` with a bootstrap over TCP. Returns when all have ended: how many of
/// them returned 0.
int run_processes(int32_t num_ranks, int (*run)(ferry_bootstrap* bootstrap));

#endif  // FERRY_TESTS_C_CHECK_H
