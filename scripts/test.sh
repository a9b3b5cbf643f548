#!/usr/bin/env bash
# Builds and runs the tests: scripts/test.sh [preset...], by default release, asan, tsan and, where nvcc is found, cuda.
# Runs every preset even if an earlier one fails, then repeats each runner's own summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=$(nproc)
summary=()
num_failed=0

# What to leave out of a sanitizer run: ctest arguments, one a line. The packaging and layering tiers build outside
# projects and read sources, to which the sanitizers add nothing. ThreadSanitizer sees the threads of one process only:
# ranks that are processes would be checked against nothing, slowly.
exclusions() {
  case $1 in
    asan) printf '%s\n' --label-exclude '^(packaging|layering)$' ;;
    tsan) printf '%s\n' --label-exclude '^(packaging|layering|multiproc|tools)$' --exclude-regex '[Pp]rocesses' ;;
  esac
}

# ThreadSanitizer's fixed shadow memory clashes with kernels that randomise addresses by more than 28 bits.
launcher_for() {
  if [[ $1 == tsan ]] && setarch "$(uname -m)" -R true 2>/dev/null; then echo "setarch $(uname -m) -R"; fi
}

build() { # preset target
  cmake --preset "$1" --log-level=WARNING >/dev/null && cmake --build "build/$1" --parallel "$jobs" --target "$2"
}

run_tests() { # preset
  local log=build/$1/test-output.txt launcher excluded
  read -ra launcher <<<"$(launcher_for "$1")"
  mapfile -t excluded < <(exclusions "$1")
  "${launcher[@]}" ctest --test-dir "build/$1" --no-tests=error --output-on-failure --parallel "$jobs" \
    "${excluded[@]}" 2>&1 | tee "$log"
}

presets=("$@")
if (($# == 0)); then
  presets=(release asan tsan)
  if command -v nvcc >/dev/null; then
    presets+=(cuda)
  else
    summary+=("cuda: nvcc is not installed, so device code was not compiled")
  fi
fi

for preset in "${presets[@]}"; do
  printf '\n== %s ==\n' "$preset"
  if [[ $preset == cuda ]]; then
    if build cuda layout_compiles; then
      summary+=("cuda: layout headers compile for the device ($(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/nvcc \1/p'))")
    else
      summary+=("cuda: FAILED to compile")
      num_failed=$((num_failed + 1))
    fi
    continue
  fi
  if ! build "$preset" all; then
    summary+=("$preset: FAILED to build")
    num_failed=$((num_failed + 1))
    continue
  fi
  if ! run_tests "$preset"; then num_failed=$((num_failed + 1)); fi
  summary+=("$preset: $(grep -E 'tests passed|No tests were found' "build/$preset/test-output.txt" || echo 'FAILED to run')")
done

printf '\n== Summary ==\n'
printf '%s\n' "${summary[@]}"
echo "Tests that need hardware this machine lacks: none (no test needs a GPU yet)"
exit $((num_failed > 0))
