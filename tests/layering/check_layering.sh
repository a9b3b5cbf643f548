#!/usr/bin/env bash
# Checks the includes allowed between folders: check_layering.sh [root of the source tree]
# Prints "file:line: problem" for each breach and exits 1 if there is one. docs/design.md gives the reasons.
set -euo pipefail
cd "${1:-"$(dirname "${BASH_SOURCE[0]}")/../.."}"

breaches=0
breach() { # location message
  printf '%s: %s\n' "$1" "$2"
  breaches=$((breaches + 1))
}

code_files() { # folders
  local folder
  for folder in "$@"; do
    if [[ -d $folder ]]; then
      find "$folder" -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' \
        -o -name '*.in' \) -print0
    fi
  done
}

# Prints "file:line:<header>" or file:line:"header" for every include under the folders.
includes_of() {
  code_files "$@" | xargs -0 --no-run-if-empty grep -nHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"][^>"]+[>"]' |
    sed -E 's/#[[:space:]]*include[[:space:]]*//; s/:[[:space:]]+/:/' || true
}

# Every include in a folder must match one of the patterns.
allow_only() { # folder reason pattern...
  local folder=$1 reason=$2 line header pattern
  shift 2
  while IFS= read -r line; do
    header=${line#*:*:}
    for pattern in "$@"; do
      if [[ $header =~ $pattern ]]; then continue 2; fi
    done
    breach "${line%:"$header"}" "includes $header: $reason"
  done < <(includes_of "$folder")
}

readonly standard='^<[a-z0-9_]+>$'   # <vector>, not <sys/mman.h> or <fmt/format.h>
readonly outside='^<[^>]+>$'         # the standard library, the system, third parties
readonly public='^"ferry/(device/)?[a-z0-9_]+\.(hpp|h|cuh)"$'
in_source() { printf '^"%s/[a-z0-9_/]+\.(hpp|h|cuh)"$' "$1"; }

allow_only include "public headers include the standard library and each other" "$standard" '^<stdint\.h>$' "$public"
allow_only src/plan "plan is pure arithmetic: public headers and itself" "$standard" '^<fmt/format.h>$' "$public" "$(in_source plan)"
allow_only src/numeric "numeric is arithmetic: public headers, plan and itself" "$outside" "$public" "$(in_source numeric)" \
  "$(in_source plan)"
allow_only src/balance "balancing is arithmetic on loads: public headers, numeric's checks and itself" "$outside" "$public" \
  "$(in_source balance)" "$(in_source numeric)"
allow_only src/core "core includes no backend: public headers, plan, numeric and itself" "$outside" "$public" \
  "$(in_source core)" "$(in_source plan)" "$(in_source numeric)"
allow_only src/local "calls that need no group: core's checks, plan, numeric, public headers and itself" "$outside" "$public" \
  "$(in_source local)" "$(in_source core)" "$(in_source plan)" "$(in_source numeric)"
allow_only src/bootstrap "bootstraps use ranks and bytes: public headers, core's file descriptors and log, and itself" \
  "$outside" "$public" "$(in_source bootstrap)" '^"core/(unique_fd|descriptors|log)\.hpp"$'
allow_only tests/oracle "the oracle is independent of the library: standard library, public headers and itself" \
  "$standard" "$public" "$(in_source oracle)"
allow_only src/node "state of one node's ranks, without other nodes: core, plan, public headers and itself" \
  "$outside" "$public" "$(in_source node)" "$(in_source core)" "$(in_source plan)"
allow_only src/net "the network moves bytes, not tokens: public headers and itself" "$outside" "$public" \
  "$(in_source net)"
allow_only src/membership "members that agree over sockets: bootstrap, core, net's blobs, public headers and itself" "$outside" \
  "$public" "$(in_source membership)" "$(in_source bootstrap)" "$(in_source core)" '^"net/blob\.hpp"$'
allow_only src/rail "connections to rail peers, without waits: core, plan, net, public headers and itself" \
  "$outside" "$public" "$(in_source rail)" "$(in_source core)" "$(in_source plan)" "$(in_source net)"
allow_only src/call "calls of all ranks together: core, plan, node, rail, net, public headers and itself" "$outside" "$public" \
  "$(in_source call)" "$(in_source core)" "$(in_source plan)" "$(in_source node)" "$(in_source rail)" "$(in_source net)"
allow_only src/one_sided "the one-sided layer: core, node, rail, net, public headers and itself" "$outside" "$public" \
  "$(in_source one_sided)" "$(in_source core)" "$(in_source plan)" "$(in_source node)" "$(in_source rail)" "$(in_source net)"
backend_may_include=("$outside" "$public" "$(in_source core)" "$(in_source plan)" "$(in_source numeric)"
  "$(in_source node)" "$(in_source net)" "$(in_source rail)" "$(in_source call)" "$(in_source one_sided)" "$(in_source local)")
for backend in cpu cuda; do
  allow_only "src/$backend" "a backend includes the layers below it and itself, never another backend" \
    "${backend_may_include[@]}" "$(in_source "$backend")"
done
# Inside src/cuda, from the bottom up: driver, memory and sync, copy, numeric, local, context, placement, call, intranode, and
# the backend on top.
allow_cuda() { # folder reason folder-under-src...
  local folder=$1 reason=$2 used
  local patterns=("$outside" "$public" "$(in_source "cuda/$folder")")
  shift 2
  for used in "$@"; do patterns+=("$(in_source "$used")"); done
  allow_only "src/cuda/$folder" "$reason" "${patterns[@]}"
}
allow_cuda driver "wrappers of driver and runtime calls use nothing of Ferry: public headers and themselves"
allow_cuda memory "memory that peers reach is independent of calls: core, plan, numeric, node, cuda/driver and itself" \
  core plan numeric node cuda/driver
allow_cuda sync "the protocol of a call uses no memory but its own words: core, plan, node, net and itself" \
  core plan node net
allow_cuda copy "copies use threads, bytes and launches: cuda/driver, cuda/sync and itself" cuda/driver cuda/sync
allow_cuda numeric "quantising uses rows, no ranks: numeric, plan, cuda/driver, cuda/memory, cuda/sync and itself" \
  numeric plan cuda/driver cuda/memory cuda/sync
allow_cuda context "no kernels: core, plan, node, net, rail, call, cuda/driver, cuda/memory, cuda/sync and itself" \
  core plan node net rail call cuda/driver cuda/memory cuda/sync
allow_cuda local "calls that need no group: local, plan, numeric, cuda/driver, cuda/memory, cuda/sync, cuda/numeric, itself" \
  local plan numeric cuda/driver cuda/memory cuda/sync cuda/numeric
allow_cuda placement "placements use no call: core, plan, cuda/driver, cuda/memory, cuda/sync and itself" \
  core plan cuda/driver cuda/memory cuda/sync
allow_cuda far "latency mode's network, no kernels: what context may include, one_sided, cuda/context and itself" \
  core plan node net rail call one_sided cuda/driver cuda/memory cuda/sync cuda/context
call_uses=(core plan numeric node cuda/driver cuda/memory cuda/sync cuda/copy cuda/numeric cuda/context cuda/placement)
allow_cuda call "parts of every kind of call use no kind of call: everything below calls, and itself" "${call_uses[@]}"
allow_cuda intranode "a kind of call includes cuda/call and what that may include, and no other kind of call" \
  "${call_uses[@]}" cuda/call
allow_cuda latency "latency mode includes cuda/far, cuda/call and what that may include, and no other kind of call" \
  "${call_uses[@]}" cuda/call cuda/far
allow_cuda internode "calls over several nodes include cuda/call, what that may include, net, rail and call" \
  "${call_uses[@]}" cuda/call net rail call
allow_cuda one_sided "no group calls: core, plan, node, one_sided, cuda/driver, cuda/memory, cuda/context, itself" \
  core plan node one_sided cuda/driver cuda/memory cuda/context
allow_only src/c "the C interface uses the library as users do: public headers and itself" "$outside" "$public" \
  "$(in_source c)"
allow_only tools/launch "forks ranks for tools and tests: public headers and itself" "$outside" "$public" \
  "$(in_source launch)"
allow_only tools "tools use the library as users do: public headers and their own" "$outside" "$public" \
  '^"(launch|run|report|device|common|ferry|demo|bench|doctor|planning)/[a-z0-9_]+\.hpp"$'
allow_only examples "examples use the library as users do: public headers only" "$outside" "$public"

while IFS= read -r location; do
  breach "$location" "names torch, which belongs under python/ only"
done < <(code_files include src tools tests benchmarks examples |
  xargs -0 --no-run-if-empty grep -nHoiwE 'torch|libtorch|aten|c10' | sed -E 's/:[^:]*$//' || true)

if ((breaches > 0)); then
  printf '%d breaches of the layering\n' "$breaches"
  exit 1
fi
echo "layering holds"
