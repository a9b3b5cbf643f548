#!/usr/bin/env bash
# Prints the folder of the UCX that a Python wheel (libucx-cu13, libucx-cu12) has installed, for FERRY_UCX_LIBRARY:
# scripts/find_ucx.sh [python3]
# Looks the package up without importing it.
set -euo pipefail
python=${1:-python3}

folder=$("$python" - <<'PYTHON'
import importlib.util

spec = importlib.util.find_spec("libucx")
print(next(iter(spec.submodule_search_locations)) if spec else "")
PYTHON
)
if [[ -z $folder || ! -e $folder/lib/libucp.so.0 ]]; then
  printf 'find_ucx: %s has no package libucx; pip install libucx-cu13 (or libucx-cu12, by your CUDA)\n' "$python" >&2
  exit 1
fi
printf '%s\n' "$folder/lib"
