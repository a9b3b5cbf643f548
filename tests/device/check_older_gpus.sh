#!/usr/bin/env bash
# Kernels of latency mode must work on GPUs of compute capability 8.0, which no build is made for by default:
# check_older_gpus.sh <source tree> <folder of generated headers> <CUDA compiler> [kernel sources…]
# Compiles them to machine code, since only the assembler sees what inline assembly asks of a GPU; unoptimised, to be quick.
set -euo pipefail
source_dir=$1
generated_dir=$2
compiler=$3
shift 3
if (($# == 0)); then set -- "$source_dir"/src/cuda/latency/*.cu; fi

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
printf '%s\0' "$@" |
  xargs -0 --max-args=1 --max-procs="$(nproc)" "$compiler" -arch=sm_80 -cubin -odir "$objects" -std=c++20 -fmad=false \
    -Xcicc -O1 -Xptxas -O0 -Werror=all-warnings -DNDEBUG -DFERRY_WITH_CUDA \
    "-I$source_dir/include" "-I$generated_dir" "-I$source_dir/src"
echo "$# sources compile for compute capability 8.0"
