#!/usr/bin/env bash
# Measures everything that depends on the number of GPUs of this host, in one go, and runs the GPU suite in what time is
# left (it is run on other hosts too, and figures from many GPUs are what cannot be had there):
#   benchmarks/many_gpus.sh OUT_DIR [--built DIR] [--ranks N] [--limit SECONDS] [--no-python]
# OUT_DIR            gets a JSON file for each measurement, what the machine is, and the suite's output
# --built DIR        take ferry and the test programs of tests/gpu/run.sh from this folder instead of building
#                    them (preset release); shared libraries that lie beside them are found
# --ranks N          (default: one for each GPU) more than GPUs share them as threads: a dry run, not a measurement
# --limit SECONDS    of all together, building left out (default 510)
# --no-python        leave out the layers, which need the packages ferry and deep_ep in python3
# The most important measurement comes first, so that a run that is cut off is worth something: calls with rows of 14 KiB
# and latency mode as users make them, numbers of multiprocessors, the kernels of latency mode alone, layers, other sizes
# and skewed routing, two nodes. Each of these parts has a limit of its own, so that none takes all the time, and so has
# each run. Prints one line for each result and, for what failed or had no time, what; exits 1 if anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PATH+=:/usr/local/cuda/bin
usage() {
  sed -n '2,16s/^# \?//p' "$0"
  exit 2
}
[[ $# -gt 0 && $1 != -* ]] || usage
mkdir -p "$1"
out=$(realpath "$1")
shift
built='' ranks='' limit_s=510 python=yes
while (($# > 0)); do
  case $1 in
    --built) built=$(realpath "${2:?--built needs a folder}") && shift 2 ;;
    --ranks) ranks=${2:?--ranks needs a number} && shift 2 ;;
    --limit) limit_s=${2:?--limit needs seconds} && shift 2 ;;
    --no-python) python=no && shift ;;
    *) usage ;;
  esac
done

num_gpus=$(nvidia-smi --list-gpus | wc -l)
if [[ -z $ranks ]]; then ranks=$num_gpus; fi
launch=()
if ((ranks > num_gpus)); then launch=(--launch threads); fi
if [[ -n $built ]]; then
  export LD_LIBRARY_PATH=$built${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  ferry=$built/ferry
else
  cmake --preset release --log-level=WARNING -DFERRY_CUDA=ON >/dev/null
  cmake --build build/release --parallel "$(nproc)" --target ferry_command litmus_test conformance_gpu_test gpu_test
  ferry=build/release/tools/ferry
fi

begin_s=$SECONDS
num_failed=0
left_s() { echo $((limit_s - (SECONDS - begin_s))); }

part_end_s=$SECONDS
part() { # seconds
  part_end_s=$(((part_end_s > SECONDS ? part_end_s : SECONDS) + $1))
}
part_left_s() {
  local own_s=$((part_end_s - SECONDS)) all_s
  all_s=$(left_s)
  echo $((own_s < all_s ? own_s : all_s))
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvidia-smi topo -m || true
  grep -m 1 'model name' /proc/cpuinfo || true
  "$ferry" --version
} >"$out/machine.txt" 2>&1

# One line for each result of a file of `ferry bench`, `benchmarks/python/bench.py` or `benchmarks/beside.py`.
lines_of() { # label
  python3 - "$1" "$out/$1.json" <<'PYTHON'
import json, sys

label, path = sys.argv[1:]
measured = json.load(open(path))
if isinstance(measured, list):  # of `ferry tune`: the sweeps of operations, the default setting first
    for sweep in measured:
        best = min(sweep["settings"], key=lambda setting: setting["time_us_p50"])
        times = [sweep["settings"][0]["time_us_p50"], best["time_us_p50"]]
        print(f"{label:28} {sweep['op']}: default {times[0]:.1f} us, best {times[1]:.1f} us {best['kernel_options']}")
    sys.exit()
for result in measured["results"]:
    if "ways" in result:
        halves, where = ("hooks" if result["split"] else "whole"), ("graph" if result["graph"] else "eager")
        what = f"{halves}, {where}" if result["measure"] == "latency" else result["dtype"]
        times = ", ".join(f"{way} {of_way['us']:.1f}" for way, of_way in result["ways"].items() if "us" in of_way)
        print(f"{label:28} {result['measure']} {what} T={result['tokens']:<5} us: {times or 'not measured'}")
        continue
    if "layer_us" in result:
        print(f"{label:28} T={result['tokens']:<5} {result['layer_us']:8.1f} us a layer")
        continue
    if "kernel_times" in result:
        times = ", ".join(f"{call} {of_call['call_us']:.1f} us" for call, of_call in result["kernel_times"].items())
        print(f"{label:28} T={result['tokens']:<5} kernels: {times}")
        continue
    time_us, ratio = result.get("time_us_p50"), result.get("ratio_to_limit")
    graph_us = result.get("graph_time_us_p50")
    line = f"{label:28} {result.get('op', ''):16} T={result['tokens']:<5} {time_us:8.1f} us"
    line += f"  ratio {ratio:.2f}" if ratio else ""
    line += f"  {result['num_sms']} SMs" if result.get("num_sms") else ""
    print(line + (f"  in a graph {graph_us:.1f} us" if graph_us else ""))
PYTHON
}

run() { # label seconds command... : the command writes OUT_DIR/label.json
  local label=$1 most_s=$2
  shift 2
  if (($(part_left_s) < 5)); then
    echo "$label: no time left"
    return
  fi
  if (($(part_left_s) < most_s)); then most_s=$(part_left_s); fi
  if timeout --kill-after=5 "$most_s" "$@" --json "$out/$label.json" >"$out/log.txt" 2>&1; then
    lines_of "$label" || num_failed=$((num_failed + 1))
  else
    num_failed=$((num_failed + 1))
    echo "$label: FAILED or took more than $most_s s: $(tail -n 1 "$out/log.txt")"
  fi
}

bench() { # label argument...
  local label=$1
  shift
  run "$label" 40 "$ferry" bench --backend cuda --ranks "$ranks" "${launch[@]}" "$@"
}

nodes() { # label transport argument...
  local label=$1 transport=$2 launch_nodes=()
  shift 2
  if [[ $transport == loopback ]]; then launch_nodes=(--launch threads); fi
  run "$label" 30 "$ferry" bench --backend cuda --ranks "$ranks" --nodes 2 "${launch_nodes[@]}" \
    --transport "$transport" "$@"
}

tune() {
  run tune 75 "$ferry" tune --backend cuda --ranks "$ranks" --tokens 4096 --hidden 7168
}

kernel_times() { # api
  if [[ $python == no ]] || ((ranks > num_gpus)); then return; fi
  run "latency_kernels_$1" 40 python3 benchmarks/python/bench.py --latency --kernel-times --api "$1" \
    --order rank_sums --dtype fp8 --ranks "$ranks" --device cuda --tokens 1,8,32,128 --iterations 30
}

layer() { # api dtype
  if [[ $python == no ]] || ((ranks > num_gpus)); then return; fi
  run "layer_$1_$2" 60 python3 benchmarks/python/bench.py --layer --api "$1" --dtype "$2" --ranks "$ranks" \
    --device cuda --tokens 64,128,512,1024,2048,4096
}

beside() {
  if [[ $python == no ]] || ((ranks > num_gpus)); then return; fi
  run beside 90 python3 benchmarks/beside.py --ranks "$ranks" --device cuda --quick
}

# What is not used of a part's time goes to those after it.
part 120
bench pair_bf16 --op pair --tokens 4096
bench dispatch_fp8 --op dispatch --dtype fp8 --tokens 4096
bench latency_pair_fp8 --op latency-pair --sweep-tokens 1,8,32,64,128 --quantize fp8 --order rank_sums
bench latency_halves_fp8 --op latency-pair --sweep-tokens 1,8,32,64,128 --quantize fp8 --order rank_sums --split
bench combine_fp8 --op combine --combine-wire fp8 --tokens 4096
bench route --op route --sweep-tokens 64,512,4096
bench plain_bf16 --op pair --memory plain --tokens 4096
bench plain_fp8 --op dispatch --memory plain --dtype fp8 --tokens 4096
bench verify_bf16 --op pair --verify --tokens 4096

part 75 # what the table of src/cuda/call/tuning.cpp is made from
tune

part 55
kernel_times deep_ep
kernel_times ferry
late=(--op latency-pair --tokens 128 --quantize fp8 --order rank_sums --late-us 200) # what that costs the others
bench latency_late "${late[@]}"
bench latency_late_split "${late[@]}" --split

part 90
layer deep_ep bf16
layer deep_ep fp8
layer ferry bf16
layer ferry fp8

part 90 # the same tokens through both packages, collectives, and DeepEP if PYTHONPATH leads to it
beside

part 80 # as the first, by tokens, row size and routing
bench tokens_bf16 --op pair --sweep-tokens 512,1024,2048,8192
bench tokens_fp8 --op dispatch --dtype fp8 --sweep-tokens 512,1024,2048,8192
bench tokens_bf16_plain --op pair --memory plain --sweep-tokens 512,1024,2048,8192
bench tokens_fp8_plain --op dispatch --memory plain --dtype fp8 --sweep-tokens 512,1024,2048,8192
bench zipf_bf16 --op pair --tokens 4096 --routing zipf
bench zipf_fp8 --op dispatch --dtype fp8 --tokens 4096 --routing zipf
bench zipf_bf16_plain --op pair --memory plain --tokens 4096 --routing zipf
bench zipf_fp8_plain --op dispatch --memory plain --dtype fp8 --tokens 4096 --routing zipf
for hidden in 2048 4096; do
  bench "hidden_${hidden}_bf16" --op pair --tokens 4096 --hidden "$hidden"
  bench "hidden_${hidden}_fp8" --op dispatch --dtype fp8 --tokens 4096 --hidden "$hidden"
  bench "hidden_${hidden}_bf16_plain" --op pair --memory plain --tokens 4096 --hidden "$hidden"
  bench "hidden_${hidden}_fp8_plain" --op dispatch --memory plain --dtype fp8 --tokens 4096 --hidden "$hidden"
done

bench route_replicas --op route --replicas 32 --sweep-tokens 64,512,4096

part 50 # two emulated nodes: between threads, and between processes as on a cluster
if ((ranks % 2 == 0)); then
  nodes nodes_bf16 loopback --op pair --sweep-tokens 128,1024,4096
  nodes nodes_latency loopback --op latency-pair --sweep-tokens 1,8,128 --quantize fp8 --order rank_sums
  nodes nodes_fp8 loopback --op dispatch --dtype fp8 --sweep-tokens 1024,4096
  if ((ranks <= num_gpus)); then
    nodes nodes_ucx_bf16 ucx --op pair --tokens 4096
    nodes nodes_ucx_latency ucx --op latency-pair --sweep-tokens 1,8,128 --quantize fp8 --order rank_sums
  fi
fi

suite() { # label filter option...
  if (($(left_s) < 20)); then
    echo "$1: no time left"
    return
  fi
  local rc=0 label=$1 filter=$2
  shift 2
  timeout --kill-after=10 "$(left_s)" tests/gpu/run.sh ${built:+--built "$built"} --no-sanitizer --no-python \
    --filter "$filter" --limit "$(left_s)" "$@" >"$out/$label.txt" 2>&1 || rc=$?
  if ((rc != 0)); then num_failed=$((num_failed + 1)); fi
  sed -n '/^== Summary/,$p' "$out/$label.txt" | tail -n 40
}
suite suite_threads '-*rocesses*' --spread
suite suite_processes '*rocesses*'
rm -f "$out/log.txt"
echo "$((SECONDS - begin_s)) s, $num_failed failed; results in $out"
((num_failed == 0))
