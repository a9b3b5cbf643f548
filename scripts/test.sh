#!/usr/bin/env bash
# Builds and runs the tests: scripts/test.sh [part...], by default release and python. Parts: the presets release,
# debug, asan, tsan and fuzz (the parsers, see tests/fuzz/README.md), compiled by clang, which shows what depends on the
# compiler; plain (the build of users: no preset, the compiler in $CXX or the system's); python (the packages, see
# scripts/test_python.sh); wheels (docs/wheels.md), where nvcc and Python 3.12 are; docs (the site, scripts/docs.sh);
# lint (scripts/lint.sh). Tests that need a GPU (label "gpu", in a release build with CUDA) run where there is one;
# tests/gpu/run.sh runs only them, and more of them. Runs every part even if an earlier one fails, then repeats each
# runner's own summary and the time of each part. Up to three failed tests of a part run once more, alone: the part
# passes if they pass, and the summary names both results.
#
# Ranks wait most of the time, so the parts after the first are built, and lint runs, at the lowest priority beside the
# tests of those before them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly max_repeated=3 max_reasons=24
readonly repeat_heading='== once more, alone: what failed =='
readonly lint_output=build/lint-output.txt
jobs=$(nproc)
have_gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then have_gpu=yes; fi
summary=()
times=() # "part build_s test_s"
num_failed=0

# Selection of tests: ctest arguments, one a line. Tests that need a GPU run in a release build, where there is one.
# ThreadSanitizer sees the threads of one process only, so ranks that are processes would run slowly and show nothing.
# Under AddressSanitizer they would mostly run the same code a second time; code of processes alone is not checked. The
# network namespaces (label "netns") change the machine's network and assert deadlines: tests/netns/run.sh runs them
# alone.
selection() {
  case $1 in
    asan | tsan) printf '%s\n' --label-exclude '^(gpu|netns)$' --exclude-regex '[Pp]rocesses' ;;
    release) printf '%s\n' --label-exclude "^($([[ $have_gpu == no ]] && echo 'gpu|')netns)\$" ;;
    *) printf '%s\n' --label-exclude '^(gpu|netns)$' ;;
  esac
}

# ThreadSanitizer's fixed shadow memory clashes with kernels that randomise addresses by more than 28 bits, and so does
# the AddressSanitizer of clang 14.
launcher_for() {
  if [[ $1 == asan || $1 == tsan || $1 == fuzz ]] && setarch "$(uname -m)" -R true 2>/dev/null; then echo "setarch $(uname -m) -R"; fi
}

# One line about the tests that need a GPU: their number, and why they ran or did not.
gpu_summary() {
  local count
  if [[ " ${parts[*]} " != *" release "* ]]; then
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

build() { # part
  case $1 in
    lint) scripts/lint.sh check >"$lint_output" 2>&1 || echo 'lint FAILED' >>"$lint_output" ;;
    docs) scripts/docs.sh --install ;;
    python) scripts/test_python.sh --install ;;
    wheels) scripts/wheels.sh ;;
    plain) cmake -S . -B build/plain --log-level=WARNING >/dev/null && cmake --build build/plain --parallel "$jobs" ;;
    *) cmake --preset "$1" --log-level=WARNING >/dev/null && cmake --build --preset "$1" --parallel "$jobs" ;;
  esac
}

run_tests() { # part
  local launcher selected failed
  case $1 in
    lint) cat "$lint_output" && ! grep -qE '^[a-z_]+ +FAILED$' "$lint_output" && grep -qE '^[a-z_]+ +ok$' "$lint_output" ;;
    docs) scripts/docs.sh --build ;;
    python) scripts/test_python.sh --test ;;
    wheels) scripts/wheels/test.sh ;;
    *)
      read -ra launcher <<<"$(launcher_for "$1")"
      mapfile -t selected < <(selection "$1")
      # Ranks wait most of the time: of seven minutes that the tests without emulated GPUs take on two cores, with three
      # at a time, the processor is busy for two.
      "${launcher[@]}" ctest --test-dir "build/$1" --no-tests=error --output-on-failure \
        --parallel "$((2 * jobs + 1))" "${selected[@]}" && return
      # A few failures may be the machine's, so they run again with nothing beside them. The summary names them anyway.
      failed=build/$1/Testing/Temporary/LastTestsFailed.log
      if [[ ! -s $failed ]] || (($(wc -l <"$failed") > max_repeated)); then return 1; fi
      printf '\n%s\n' "$repeat_heading"
      "${launcher[@]}" ctest --test-dir "build/$1" --rerun-failed --output-on-failure
      ;;
  esac
}

# Summary line of the runner, from its output: ctest's line, pytest's line, or the checks of lint.
summary_of() { # part log
  case $1 in
    lint) sed -nE 's/^([a-z]+) +(ok|FAILED)$/\1 \2/p' "$2" | paste -sd, | sed 's/,/, /g' ;;
    docs) grep -E '^docs: ' "$2" | tail -n 1 | sed 's/^docs: //' ;;
    python) grep -E '^=* ?[0-9]+ (passed|failed|error)' "$2" | tail -n 1 ;;
    wheels) sed -n 's/^wheels: //p' "$2" | tail -n 1 ;;
    *) grep -E 'tests passed|No tests were found' "$2" | paste -sd';' | sed 's/;/; these once more, alone: /' ;;
  esac
}

# Failed tests as the runner lists them, and the first lines that explain the failures.
failed_tests() { # part log
  case $1 in
    lint) if grep -qE '^[a-z]+ +FAILED$' "$2"; then grep -vE '^[a-z]+ +(ok|FAILED)$' "$2" | head -n "$max_reasons" | sed 's/^/  /'; fi ;;
    python) sed -nE 's/^(FAILED|ERROR) /  &/p' "$2" ;;
    docs) sed -nE '/(WARNING|ERROR|error|warning|differs)[: ]/s/^/  /p' "$2" | head -n "$max_reasons" ;;
    *)
      sed -nE "/^$repeat_heading/q; /^The following tests FAILED:/,\$ s/^[[:space:]]+[0-9]+ - /  /p" "$2"
      awk '/Test +#[0-9]+:.*\*\*\*/ { inside = 1; next }
           /^ *Start +[0-9]+:|Test +#[0-9]+:|tests passed/ { inside = 0 }
           inside && NF' "$2" |
        { grep -E 'ERROR|SUMMARY|runtime error|: Failure|terminate|leak of|^ *#[0-9] |Which|Actual|exceeded|exception with' || true; } |
        head -n "$max_reasons" | sed 's/^/    /'
      ;;
  esac | cut -c1-200
}

# A part that is built has "seconds exit_code" in this file.
built_mark() { echo "build/$1-built.txt"; }

build_timed() { # part
  local start=$SECONDS code=0
  build "$1" || code=$?
  echo "$((SECONDS - start)) $code" >"$(built_mark "$1").new"
  mv "$(built_mark "$1").new" "$(built_mark "$1")"
}

# Builds the parts one after the other, in a process group of its own that ends with this script.
build_behind() { # part...
  set -m
  {
    renice -n 19 "$BASHPID" >/dev/null
    for part in "$@"; do build_timed "$part" >"build/$part-build-output.txt" 2>&1; done
  } </dev/null &
  builder=$!
  set +m
  trap 'kill -- -"$builder" 2>/dev/null || true' EXIT
}

wait_until_built() { # part
  until [[ -e $(built_mark "$1") ]]; do
    if ! kill -0 "$builder" 2>/dev/null; then break; fi
    sleep 0.5
  done
  cat "build/$1-build-output.txt"
}

run_part() { # part
  local log=build/$1-test-output.txt start build_s=0 code=1
  printf '\n== %s ==\n' "$1"
  if [[ $1 == "${parts[0]}" ]]; then
    build_timed "$1"
    if ((${#parts[@]} > 1)); then build_behind "${parts[@]:1}"; fi
  else
    wait_until_built "$1"
  fi
  if [[ -e $(built_mark "$1") ]]; then read -r build_s code <"$(built_mark "$1")"; fi
  if ((code != 0)); then
    summary+=("$1: FAILED to build")
    times+=("$1 $build_s 0")
    num_failed=$((num_failed + 1))
    return
  fi
  start=$SECONDS
  if ! run_tests "$1" 2>&1 | tee "$log"; then num_failed=$((num_failed + 1)); fi
  summary+=("$1: $(summary_of "$1" "$log" || echo 'FAILED to run')")
  mapfile -t -O "${#summary[@]}" summary < <(failed_tests "$1" "$log")
  times+=("$1 $build_s $((SECONDS - start))")
}

parts=("$@")
if (($# == 0)); then parts=(release python); fi
if [[ " ${parts[*]} " == *' wheels '* ]] && ! missing=$(scripts/wheels.sh --missing 2>&1); then
  summary+=("wheels: not built: ${missing#wheels: }")
  mapfile -t parts < <(printf '%s\n' "${parts[@]}" | grep -vx wheels || true)
fi
# Lint is no condition of the tests, so all else is built before it runs.
if [[ " ${parts[*]} " == *' lint '* ]]; then
  mapfile -t parts < <(printf '%s\n' "${parts[@]}" | grep -vx lint || true)
  parts+=(lint)
fi
mkdir -p build
for part in "${parts[@]}"; do rm -f "$(built_mark "$part")"; done
for part in "${parts[@]}"; do run_part "$part"; done

printf '\n== Summary ==\n'
printf '%s\n' "${summary[@]}"
if [[ " ${parts[*]} " != ' lint ' && " ${parts[*]} " != ' docs ' ]]; then
  echo "Tests that need a GPU (conformance_gpu_test, gpu_test): $(gpu_summary)"
fi
echo
printf '%s\n' "${times[@]}" | awk -v jobs="$jobs" -v all_s="$SECONDS" '
  BEGIN { printf "%-12s %8s %8s   minutes, %d jobs\n", "part", "build", "test", jobs }
  { printf "%-12s %8.1f %8.1f\n", $1, $2 / 60, $3 / 60; build += $2; test += $3 }
  END { printf "%-12s %8.1f %8.1f   %.1f from the first build to the last test\n", "all", build / 60, test / 60, all_s / 60 }'
exit $((num_failed > 0))
