#!/usr/bin/env bash
# Kernels of latency mode must work on GPUs of compute capability 8.0, which no build is made for by default:
# check_older_gpus.sh <source tree> <folder of generated headers> <CUDA compiler with its options…>
# Compiles them to machine code, since only the assembler sees what inline assembly asks of a GPU; unoptimised, to be
# quick, one after the other, and not the halves of calls, of which the whole ones are made.
set -euo pipefail
source_dir=$1
generated_dir=$2
shift 2

readonly kernels=(latency/combine_whole latency/dispatch_whole latency/mask_gates latency/masked_combine
  latency/masked_dispatch latency/masked_refusal latency/refusal latency/small_combine latency/small_dispatch
  intranode/wait_times)

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
for kernel in "${kernels[@]}"; do
  "$@" -arch=sm_80 -cubin -odir "$objects" -std=c++20 -fmad=false -Xcicc -O1 -Xptxas -O0 -Werror=all-warnings \
    -DNDEBUG -DFERRY_WITH_CUDA "-I$source_dir/include" "-I$generated_dir" "-I$source_dir/src" \
    "$source_dir/src/cuda/$kernel.cu"
done
echo "${#kernels[@]} sources compile for compute capability 8.0"
