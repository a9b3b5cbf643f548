#!/usr/bin/env bash
# Runs a program as N rank processes on this machine, as a launcher would: run_processes.sh N program [argument...]
# Exits with 0 if every rank does.
set -euo pipefail
num_ranks=$1
shift

FERRY_NUM_RANKS=$num_ranks
FERRY_SECRET=$(od --address-radix=n --read-bytes=16 --format=x1 /dev/urandom | tr -d ' \n')
export FERRY_NUM_RANKS FERRY_SECRET
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT

# A shell cannot reserve a free port; if another process takes this one, try another.
for _ in 1 2 3 4 5; do
  FERRY_PORT=$((20000 + RANDOM % 10000)) # below the range that Linux gives to outgoing connections
  export FERRY_PORT
  ranks=()
  for ((rank = 0; rank < num_ranks; ++rank)); do
    FERRY_RANK=$rank "$@" 2>>"$errors" &
    ranks+=($!)
  done
  num_failed=0
  for rank in "${ranks[@]}"; do wait "$rank" || num_failed=$((num_failed + 1)); done
  if ((num_failed == 0)); then exit 0; fi
  cat "$errors" >&2
  if ! grep -qi 'in use' "$errors"; then break; fi
  : >"$errors"
done
printf '%d of %d ranks failed\n' "$num_failed" "$num_ranks" >&2
exit 1
