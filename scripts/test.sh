#!/usr/bin/env bash
# Builds and runs the tests: scripts/test.sh [preset...], by default release, asan, fuzz (the parsers, see
# tests/fuzz/README.md), tsan and python (the package, see scripts/test_python.sh). Tests that need a GPU (label "gpu",
# in a release build with CUDA) run where there is one; tests/gpu/run.sh runs only them, and more of them.
# Runs every preset even if an earlier one fails, then repeats each runner's own summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=$(nproc)
have_gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then have_gpu=yes; fi
summary=()
num_failed=0

# What to leave out of a run: ctest arguments, one a line. Tests that need a GPU run in a release build, where there is
# one. The packaging and layering tiers build outside projects and read sources, to which the sanitizers add nothing.
# ThreadSanitizer sees the threads of one process only: ranks that are processes would be checked against nothing,
# slowly. The network namespaces (label "netns") change the machine's network and assert deadlines: they run alone, by
# tests/netns/run.py.
exclusions() {
  case $1 in
    asan) printf '%s\n' --label-exclude '^(packaging|layering|gpu|netns)$' ;;
    tsan) printf '%s\n' --label-exclude '^(packaging|layering|gpu|netns|multiproc|tools)$' --exclude-regex '[Pp]rocesses' ;;
    release) printf '%s\n' --label-exclude "^($([[ $have_gpu == no ]] && echo 'gpu|')netns)\$" ;;
    *) printf '%s\n' --label-exclude '^(gpu|netns)$' ;;
  esac
}

# ThreadSanitizer's fixed shadow memory clashes with kernels that randomise addresses by more than 28 bits, and so does
# the AddressSanitizer of clang 14.
launcher_for() {
  if [[ $1 == tsan || $1 == fuzz ]] && setarch "$(uname -m)" -R true 2>/dev/null; then echo "setarch $(uname -m) -R"; fi
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

# One line on the tests that need a GPU: how many there are and why they ran or did not.
gpu_summary() {
  local count
  if [[ " ${presets[*]} " != *" release "* ]]; then
    echo "not looked for: they belong to preset release"
    return
  fi
  count=$(ctest --test-dir build/release --show-only --label-regex '^gpu$' 2>/dev/null | sed -n 's/^Total Tests: //p')
  if ((${count:-0} == 0)); then
    echo "none built: preset release has no CUDA (nvcc was not found, or FERRY_CUDA is OFF)"
  elif [[ $have_gpu == no ]]; then
    echo "$count not run: nvidia-smi -L finds no GPU here (tests/gpu/run.sh runs them where there is one)"
  else
    echo "$count, run with preset release: $(nvidia-smi -L | head -n 1 | sed 's/ (UUID.*//')"
  fi
}

test_python() {
  local log=build/python-test-output.txt
  mkdir -p build
  if ! scripts/test_python.sh 2>&1 | tee "$log"; then num_failed=$((num_failed + 1)); fi
  summary+=("python: $(grep -E '^=* ?[0-9]+ (passed|failed|error)' "$log" | tail -n 1 || true)")
  if [[ ${summary[-1]} == 'python: ' ]]; then summary[-1]='python: FAILED to build'; fi
}

presets=("$@")
if (($# == 0)); then presets=(release asan fuzz tsan python); fi

for preset in "${presets[@]}"; do
  printf '\n== %s ==\n' "$preset"
  if [[ $preset == python ]]; then
    test_python
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
echo "Tests that need a GPU (conformance_gpu_test, gpu_test): $(gpu_summary)"
exit $((num_failed > 0))
