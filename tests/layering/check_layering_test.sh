#!/usr/bin/env bash
# Tests that check_layering.sh finds each kind of breach and names file and line.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

expect() { # exit-status pattern what
  local status=0 output
  output=$("$here/check_layering.sh" "$tree") || status=$?
  if [[ $status != "$1" || ! $output =~ $2 ]]; then
    printf '%s: expected status %s and "%s", got status %s and:\n%s\n' "$3" "$1" "$2" "$status" "$output"
    exit 1
  fi
}

try() { # file line-of-code pattern: this line, third in an otherwise good file, is a breach
  mkdir -p "$tree/$(dirname "$1")"
  printf '#include <vector>\n\n%s\n' "$2" >"$tree/$1"
  expect 1 "^$1:3: $3" "$1 with '$2'"
  rm "$tree/$1"
}

mkdir -p "$tree/src/core"
printf '#include <vector>\n#include "ferry/group.hpp"\n#include "plan/slots.hpp"\n' >"$tree/src/core/good.cpp"
expect 0 "layering holds" "a good tree"

try include/ferry/a.hpp '#include <fmt/format.h>' 'includes <fmt/format.h>'
try include/ferry/a.hpp '#include <sys/mman.h>' 'includes <sys/mman.h>'
try include/ferry/a.hpp '#include "core/backend.hpp"' 'includes "core/backend.hpp"'
try src/core/a.cpp '#include "cpu/arena.hpp"' 'includes "cpu/arena.hpp"'
try src/core/a.cpp '#  include "../cpu/arena.hpp"' 'includes "../cpu/arena.hpp"'
try src/plan/a.hpp '#include <cuda_runtime.h>' 'includes <cuda_runtime.h>'
try src/plan/a.hpp '#include "core/agreement.hpp"' 'includes "core/agreement.hpp"'
try src/numeric/a.cpp '#include "core/agreement.hpp"' 'includes "core/agreement.hpp"'
try src/core/a.cpp '#include "local/local_ops.hpp"' 'includes "local/local_ops.hpp"'
try src/local/a.cpp '#include "node/peers.hpp"' 'includes "node/peers.hpp"'
try src/bootstrap/a.cpp '#include "core/backend.hpp"' 'includes "core/backend.hpp"'
try tests/oracle/a.cpp '#include "plan/slots.hpp"' 'includes "plan/slots.hpp"'
try src/node/a.cpp '#include "rail/rails.hpp"' 'includes "rail/rails.hpp"'
try src/rail/a.cpp '#include "node/peers.hpp"' 'includes "node/peers.hpp"'
try src/call/a.cpp '#include "cpu/backend.hpp"' 'includes "cpu/backend.hpp"'
try src/net/a.cpp '#include "node/arena.hpp"' 'includes "node/arena.hpp"'
try src/net/ucx/a.cpp '#include "core/backend.hpp"' 'includes "core/backend.hpp"'
try src/cpu/a.cpp '#include "cuda/arena.hpp"' 'includes "cuda/arena.hpp"'
try src/cpu/a.cpp '#include "oracle/oracle.hpp"' 'includes "oracle/oracle.hpp"'
try src/cuda/driver/a.cpp '#include "cuda/memory/arena.hpp"' 'includes "cuda/memory/arena.hpp"'
try src/cuda/memory/a.cpp '#include "cuda/sync/control.hpp"' 'includes "cuda/sync/control.hpp"'
try src/cuda/sync/a.cuh '#include "cuda/copy/bulk_copy.cuh"' 'includes "cuda/copy/bulk_copy.cuh"'
try src/cuda/copy/a.cuh '#include "cuda/context/context.hpp"' 'includes "cuda/context/context.hpp"'
try src/cuda/context/a.cpp '#include "cuda/intranode/calls.hpp"' 'includes "cuda/intranode/calls.hpp"'
try src/cuda/intranode/a.cu '#include "cuda/backend.hpp"' 'includes "cuda/backend.hpp"'
try src/cuda/call/a.cpp '#include "cuda/intranode/calls.hpp"' 'includes "cuda/intranode/calls.hpp"'
try src/cuda/placement/a.cpp '#include "cuda/call/routing.hpp"' 'includes "cuda/call/routing.hpp"'
try src/cuda/local/a.cpp '#include "cuda/context/context.hpp"' 'includes "cuda/context/context.hpp"'
try src/cuda/internode/a.cpp '#include "cuda/intranode/calls.hpp"' 'includes "cuda/intranode/calls.hpp"'
try src/cuda/latency/a.cu '#include "cuda/intranode/entries.cuh"' 'includes "cuda/intranode/entries.cuh"'
try tools/demo/a.cpp '#include "plan/slots.hpp"' 'includes "plan/slots.hpp"'
try tools/launch/a.cpp '#include "run/launcher.hpp"' 'includes "run/launcher.hpp"'
try examples/a.cpp '#include "core/backend.hpp"' 'includes "core/backend.hpp"'
forbidden=tor
forbidden+=ch # in two parts, so that this file passes the check it tests
try src/cpu/a.cpp "using $forbidden::Tensor;" "names $forbidden"
echo "the layering check finds every breach"
