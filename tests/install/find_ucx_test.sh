#!/usr/bin/env bash
# Tests that scripts/find_ucx.sh prints the UCX folder of a wheel, or the package to install.
set -euo pipefail
find_ucx=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/scripts/find_ucx.sh
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT

fail() {
  printf '%s\n' "$*"
  exit 1
}

# Isolates Python from the packages of this machine.
python=$packages/python
printf '#!/bin/sh\nPYTHONPATH="%s" exec python3 -S "$@"\n' "$packages" >"$python"
chmod +x "$python"

if output=$("$find_ucx" "$python" 2>&1); then fail "found without the package: $output"; fi
[[ $output == *"pip install libucx-cu13"* ]] || fail "does not name the package to install: $output"

mkdir -p "$packages/libucx/lib"
printf 'raise ImportError("looked up, not imported")\n' >"$packages/libucx/__init__.py"
if output=$("$find_ucx" "$python" 2>&1); then fail "found without its library: $output"; fi
touch "$packages/libucx/lib/libucp.so.0"
output=$("$find_ucx" "$python")
[[ $output == "$packages/libucx/lib" ]] || fail "expected $packages/libucx/lib, got $output"
