#!/usr/bin/env bash
# Runs all tests that need GPUs, then the smallest of them under NVIDIA's memory and race checkers:
#   tests/gpu/run.sh [--built DIR] [--filter PATTERN] [--limit SECONDS] [--spread] [--no-sanitizer]
#                    [--no-python]
# --built DIR       run litmus_test, conformance_gpu_test, gpu_test and ucx_card_cuda_test from this folder instead of
#                   building them (preset release); shared libraries in the same folder are found, and the stand-in for
#                   UCX in its folder library
# --filter PATTERN  only tests that match, in GoogleTest's form, e.g. '*Graph*:-*plain*'
# --limit SECONDS   for each call of a test program (default 600); it is then stopped, and the table names the test
# --spread          run a share of each program's tests on each GPU, concurrently: a quarter of the time on four, but no
#                   test has ranks on several
# --no-sanitizer    leave out compute-sanitizer
# --no-python       leave out the tests of the Python packages on GPU tensors (never run with --built)
# Prints GoogleTest's own output and one table at the end; exits 1 if anything failed. Ranks that are threads need about
# a minute on one H100. Ranks that are processes start CUDA again in every test and take turns on a shared GPU, which
# needs many minutes there: conformance by processes had not finished after four.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PATH+=:/usr/local/cuda/bin
built='' filter='*' limit_s=600 spread=no sanitize=yes python=yes
while (($# > 0)); do
  case $1 in
    --built) built=$(realpath "${2:?--built needs a folder}") && shift 2 ;;
    --filter) filter=${2:?--filter needs a pattern} && shift 2 ;;
    --limit) limit_s=${2:?--limit needs seconds} && shift 2 ;;
    --spread) spread=yes && shift ;;
    --no-sanitizer) sanitize=no && shift ;;
    --no-python) python=no && shift ;;
    *)
      sed -n '2,16s/^# \?//p' "$0"
      exit 2
      ;;
  esac
done

if [[ -n $built ]]; then python=no; fi
if [[ -n $built ]]; then export LD_LIBRARY_PATH=$built${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; fi

log_dir=$(mktemp -d)
trap 'rm -rf "$log_dir"' EXIT
table=()
num_failed=0

build() {
  cmake --preset release --log-level=WARNING -DFERRY_CUDA=ON >/dev/null
  cmake --build build/release --parallel "$(nproc)" --target litmus_test conformance_gpu_test gpu_test ucx_card_cuda_test
}

program() { # name folder: the path of a test program
  if [[ -n $built ]]; then echo "$built/$1"; else echo "build/release/tests/$2/$1"; fi
}

fail() { # label reason
  num_failed=$((num_failed + 1))
  table+=("$(printf '%-34s          FAILED: %s' "$1" "$2")")
}

# Full names of a program's tests that match the filter and do, or do not, fork their ranks ("rocesses" in the name). A
# process that has run rank threads on a GPU can no longer fork, so the two kinds run in two calls.
names_of() { # path forking|threaded
  local invert=()
  if [[ $2 == threaded ]]; then invert=(-v); fi
  "$1" --gtest_list_tests --gtest_filter="$filter" |
    sed 's/ *#.*//' | awk '/^[^ ].*\.$/ {suite = $1} /^  / {print suite $1}' |
    grep "${invert[@]}" rocesses | paste -sd: || true
}

summary_of() { # log
  grep -E '^=* ?[0-9]+ (passed|failed|error)' "$1" | tail -n 1 || true
  grep -E '^\[  (PASSED|FAILED) +\] [0-9]+ tests?|^\[  SKIPPED \] [0-9]+ tests?' "$1" |
    sed -E 's/^\[ +([A-Z]+) +\] ([0-9]+).*/\2 \1/' | tr '[:upper:]' '[:lower:]' | paste -sd, | sed 's/,/, /g' || true
}

run() { # label command...
  printf '\n== %s ==\n' "$1"
  run_here "$@"
}

# Runs one share per GPU; GoogleTest deals out the tests. Shares return the counts in their own variables by files.
# shellcheck disable=SC2030,SC2031
run_spread() { # label command...
  local label=$1 gpu num_gpus shares=() share gpus=()
  shift
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  else
    mapfile -t gpus < <(nvidia-smi --list-gpus | awk '{print NR - 1}')
  fi
  num_gpus=${#gpus[@]}
  for ((gpu = 0; gpu < num_gpus; ++gpu)); do
    (
      export CUDA_VISIBLE_DEVICES=${gpus[gpu]} GTEST_TOTAL_SHARDS=$num_gpus GTEST_SHARD_INDEX=$gpu
      table=() num_failed=0
      run_here "$label.gpu$gpu" "$@" >"$log_dir/$label.gpu$gpu.output"
      printf '%s\n' "${table[@]}" >"$log_dir/$label.gpu$gpu.table"
      exit "$num_failed"
    ) &
    shares+=($!)
  done
  for ((gpu = 0; gpu < num_gpus; ++gpu)); do
    wait "${shares[gpu]}" || num_failed=$((num_failed + 1))
    printf '\n== %s ==\n' "$label.gpu$gpu"
    cat "$log_dir/$label.gpu$gpu.output"
    mapfile -t share <"$log_dir/$label.gpu$gpu.table"
    table+=("${share[@]}")
  done
}

run_here() { # label command...
  local label=$1 log rc=0 begin_s=$SECONDS result
  log="$log_dir/$label.log"
  shift
  timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee "$log" |
    grep -vE '^\[ +(RUN|OK) +\]|^\[-+\]|^$|^Note: Google' || rc=${PIPESTATUS[0]}
  result=$(summary_of "$log")
  if grep -qE '^=+ ERROR SUMMARY|RACECHECK SUMMARY' "$log"; then
    result+="; $(grep -hE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/^=* //' | sort | uniq -c |
      sed 's/^ *//' | paste -sd' ')"
  fi
  if ((rc == 124 || rc == 137)); then
    result+="; $(grep -c '^\[       OK' "$log" || true) passed, then stopped after $limit_s s in$(
      grep '^\[ RUN' "$log" | tail -n 1 | sed 's/^[^]]*\]//')"
  fi
  if ((rc != 0)); then
    num_failed=$((num_failed + 1))
    result="FAILED (exit code $rc) $result"
  fi
  table+=("$(printf '%-34s %5d s  %s' "$label" $((SECONDS - begin_s)) "$result")")
}

run_tests() { # program folder [variable=value...]
  local path names kind found=no variables=("${@:3}")
  path=$(program "$1" "$2")
  if [[ ! -x $path ]]; then
    fail "$1" "there is no $path"
    return
  fi
  for kind in threaded forking; do
    names=$(names_of "$path" "$kind")
    if [[ -z $names ]]; then continue; fi
    found=yes
    if [[ $spread == yes ]]; then
      run_spread "$1.$kind" env "${variables[@]}" "$path" --gtest_filter="$names"
    else
      run "$1.$kind" env "${variables[@]}" "$path" --gtest_filter="$names"
    fi
  done
  if [[ $found == no && $filter == '*' ]]; then fail "$1" "lists no tests"; fi
}

# Uses one rank: the checkers may run one kernel at a time, and several ranks in a process wait for each other.
run_checkers() {
  local tool
  if ! command -v compute-sanitizer >/dev/null; then
    table+=("$(printf '%-34s          left out: not installed (part of the CUDA toolkit)' compute-sanitizer)")
    return
  fi
  for tool in memcheck racecheck synccheck; do
    run "compute-sanitizer.$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$(program gpu_test gpu)" \
      --gtest_filter='SmallExchange.OneRank*'
  done
}

if [[ -z $built ]]; then build; fi
run_tests litmus_test gpu
run_tests conformance_gpu_test conformance
run_tests gpu_test gpu
run_tests ucx_card_cuda_test ucx_card ${built:+"FERRY_UCX_LIBRARY=$built/library"}
if [[ $sanitize == yes ]]; then
  run_checkers
else
  table+=("$(printf '%-34s          left out: --no-sanitizer' compute-sanitizer)")
fi

if [[ $python == yes ]]; then
  run python scripts/test_python.sh -k 'cuda or gpu'
else
  table+=("$(printf '%-34s          left out' python)")
fi

printf '\n== Summary (%d s) ==\n' "$SECONDS"
nvidia-smi -L 2>/dev/null || echo "nvidia-smi finds no GPU"
printf '%s\n' "${table[@]}"
exit $((num_failed > 0))
