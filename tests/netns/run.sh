#!/usr/bin/env bash
# Groups over two hosts that are two network namespaces: tests/netns/run.sh [--ferry FILE] [CASE…]
# --ferry FILE  the command to run (default: build/release/tools/ferry)
# CASE          only these (default: all; --list names them)
# Needs root, iproute2 and UCX; says what is missing and exits with 77 where it cannot run. Prints a line per case, `ok`,
# `FAILED` or `SKIPPED`, name, seconds, detail; ends with 1 if any failed. docs/transport.md says what it shows.
#
#   namespace a: ranks 0, 1                          namespace b: ranks 2, 3
#     control  192.0.2.1     ── veth pair ──     192.0.2.2      the bootstrap
#     data     198.51.100.1  ── veth pair ──     198.51.100.2   tokens, by UCX
#     bad      203.0.113.1   ── a program ──     203.0.113.2    tokens, in the cases tun-…; see bad_link.py
#
# Two links, so that tokens can be cut off while the bootstrap, over which `ferry bench` lines its ranks up, goes on.
# shellcheck disable=SC2317 # functions are called by name too, through await and trap
set -euo pipefail

# Where tc is, which the path of a plain user does not have.
PATH+=:/usr/sbin:/sbin

readonly num_ranks=4 ranks_per_host=2
readonly exit_skipped=77
# Where nothing is to fail: far more than any case needs, so that only a hang outlasts it.
readonly patient_s=60
# Where something is to fail: each rank must have ended after twice this and the slack, which is for starting processes
# and for a busy machine.
readonly deadline_s=2 slack_s=5
readonly poll_s=0.05

readonly cases=(demo bench bench-fp8 four-nodes delay-2ms delay-20ms loss-1% reorder-25% slow-link
  tun-delay-2ms tun-delay-20ms tun-loss-1% tun-reorder-25%
  killed-rank cut-data-link cut-both-links no-way)

usage() {
  sed -n '2,14s/^# \?//p' "$0"
  exit 2
}

here=$(dirname "${BASH_SOURCE[0]}")
ferry=$here/../../build/release/tools/ferry
wanted=()
while (($# > 0)); do
  case $1 in
    --ferry) ferry=${2:?--ferry needs a file} && shift 2 ;;
    --list) printf '%s\n' "${cases[@]}" && exit 0 ;;
    -*) usage ;;
    *)
      [[ " ${cases[*]} " == *" $1 "* ]] || usage
      wanted+=("$1") && shift
      ;;
  esac
done
if ((${#wanted[@]} == 0)); then wanted=("${cases[@]}"); fi

cannot_run() {
  echo "SKIPPED: $*"
  exit "$exit_skipped"
}

if [[ ! -x $ferry ]]; then
  echo "tests/netns/run.sh: no command at $ferry; build target ferry_command of preset release, or give --ferry" >&2
  exit 2
fi
ferry=$(realpath "$ferry")
if ((EUID != 0)); then cannot_run "network namespaces are root's to make; this is user $(id -un)"; fi
command -v ip >/dev/null || cannot_run "there is no command ip; install iproute2"
# Not asked of `ferry doctor`, whose words are for people: two nodes on this host need the same network.
if ! reason=$("$ferry" bench --launch fork --ranks 2 --nodes 2 --tokens 1 --hidden 64 --topk 1 --experts 2 --iterations 1 \
  --transport ucx --timeout "$patient_s" 2>&1 >/dev/null); then
  cannot_run "no groups of several nodes over UCX here: ${reason##*$'\n'}"
fi

readonly host_a=ferry-$$-a host_b=ferry-$$-b
work=$(mktemp -d)
pids=()
link_pid=

end_ranks() {
  local pid
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
}

end_bad_link() {
  if [[ -z $link_pid ]]; then return 0; fi
  kill -KILL "$link_pid" 2>/dev/null || true
  wait "$link_pid" 2>/dev/null || true
  link_pid=
}

clean_up() {
  trap - EXIT
  # Each step, whatever became of the one before.
  set +e
  end_ranks
  end_bad_link
  # With its name and its last process a namespace ends, and with it its interfaces.
  ip netns delete "$host_a" 2>/dev/null || true
  ip netns delete "$host_b" 2>/dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

now_ms() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); }

# Polls until the command after the seconds succeeds; fails when the seconds are over.
await() { # seconds command…
  local end_ms=$(($(now_ms) + $1 * 1000))
  shift
  until "$@"; do
    if (($(now_ms) >= end_ms)); then return 1; fi
    sleep "$poll_s"
  done
}

# --- The two hosts ---------------------------------------------------------------------------------------------------

on_both() { # command… with %h for the namespace
  local host
  for host in "$host_a" "$host_b"; do "${@//%h/$host}"; done
}

# An interface is told to be up some time before it is, and UCX passes over one that is not.
links_up() {
  local host link
  for host in "$host_a" "$host_b"; do
    for link in control data; do
      [[ $(ip -n "$host" link show dev "$link") == *'state UP'* ]] || return 1
    done
  done
}

make_hosts() {
  local made
  if ! made=$(ip netns add "$host_a" 2>&1 && ip netns add "$host_b" 2>&1); then
    cannot_run "this machine lets nobody make network namespaces: $made"
  fi
  local link
  for link in control data; do
    if ! made=$(ip link add name "$link" netns "$host_a" type veth peer name "$link" netns "$host_b" 2>&1); then
      cannot_run "this kernel has no veth pairs: $made"
    fi
  done
  ip -n "$host_a" address add 192.0.2.1/24 dev control
  ip -n "$host_b" address add 192.0.2.2/24 dev control
  ip -n "$host_a" address add 198.51.100.1/24 dev data
  ip -n "$host_b" address add 198.51.100.2/24 dev data
  # Ranks of one host meet over the addresses above too, by way of lo.
  on_both ip -n %h link set lo up
  raise_links
}

raise_links() {
  on_both ip -n %h link set control up
  on_both ip -n %h link set data up
  if ! await 5 links_up; then
    echo "tests/netns/run.sh: the links between the namespaces did not come up in 5 s" >&2
    exit 1
  fi
}

# Bytes that have left over the link in use, in both directions.
data_bytes() {
  local host total=0 line
  for host in "$host_a" "$host_b"; do
    line=$(ip -n "$host" -statistics link show dev "$interface" | sed -n '/TX:/{n;p}')
    read -r line _ <<<"$line"
    total=$((total + line))
  done
  echo "$total"
}

# --- The ranks -------------------------------------------------------------------------------------------------------

port=29500
interface=data

start_ranks() { # arguments of ferry
  local rank host
  # A connection of the case before may still hold its port.
  port=$((port + 2))
  pids=()
  for ((rank = 0; rank < num_ranks; ++rank)); do
    host=$host_a
    if ((rank >= ranks_per_host)); then host=$host_b; fi
    ip netns exec "$host" env -i PATH="$PATH" RANK=$rank WORLD_SIZE=$num_ranks LOCAL_RANK=$((rank % ranks_per_host)) \
      LOCAL_WORLD_SIZE=$ranks_per_host MASTER_ADDR=192.0.2.1 MASTER_PORT=$port FERRY_SECRET="$secret" UCX_TLS=tcp \
      UCX_NET_DEVICES="$interface" "$ferry" "$@" >"$work/out.$rank" 2>"$work/err.$rank" </dev/null &
    pids+=($!)
  done
}

all_ended() {
  local pid
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then return 1; fi
  done
}

# Sets codes to the ranks' exit codes, "hung" for those that are still there after so many seconds.
await_end() { # seconds
  local rank
  codes=()
  await "$1" all_ended || true
  for ((rank = 0; rank < num_ranks; ++rank)); do
    if kill -0 "${pids[rank]}" 2>/dev/null; then
      codes+=(hung)
    else
      codes+=(0)
      wait "${pids[rank]}" 2>/dev/null || codes[rank]=$?
    fi
  done
  end_ranks
}

told() { tail -n 1 "$work/err.$1"; }

# --- What must hold --------------------------------------------------------------------------------------------------
# A case is a function that sets detail and returns 0 for ok, 1 for failed and 2 for skipped.

# All ranks ended well, and what they exchanged went over the data link.
expect_success() { # ferry's arguments
  local before
  before=$(data_bytes)
  start_ranks "$@"
  # The ranks' own deadline first: what they say of it is better than that they hang.
  await_end $((2 * patient_s))
  local moved=$(($(data_bytes) - before))
  detail="exit codes ${codes[*]}, $((moved / 1000)) kB over the link"
  [[ ${codes[*]} == '0 0 0 0' ]] && ((moved > 100000))
}

demo() {
  expect_success demo --text "$0" --tokens 32 --timeout "$patient_s" || return 1
  grep -q '^verified' "$work/out.0" && detail+=", $(grep '^verified' "$work/out.0")"
}

# Checks every row and every sum by itself and says nothing of it.
readonly small_layer=(--tokens 64 --hidden 512 --topk 4 --experts 16)
bench() { # options
  expect_success bench "${small_layer[@]}" --warmup 1 --timeout "$patient_s" "$@" || return 1
  detail+=", $(awk '$1 == "pair" && $3 ~ /^[0-9.]+$/ { print "a pair takes " $3 " " $4; exit }' "$work/out.0")"
}

# Something between the hosts that is not as good as a veth pair.
over_bad_link() { # qdisc and its options
  if ! command -v tc >/dev/null; then
    detail="there is no command tc; install iproute2"
    return 2
  fi
  if ! on_both tc -n %h qdisc add dev data root "$@" 2>/dev/null; then
    detail="this kernel has no $1 (sch_$1)"
    return 2
  fi
  local result=0
  bench --iterations 3 || result=$?
  on_both tc -n %h qdisc delete dev data root
  return "$result"
}

link_is_made() { grep -q ready "$work/link"; }
bad_is_up() {
  [[ $(ip -n "$host_a" link show dev bad) == *,LOWER_UP* && $(ip -n "$host_b" link show dev bad) == *,LOWER_UP* ]]
}

# The same where the kernel has no netem: a program between two tun devices.
over_tun() { # options of bad_link.py
  if ! command -v python3 >/dev/null; then
    detail="there is no command python3"
    return 2
  fi
  if [[ ! -c /dev/net/tun ]]; then
    detail="this kernel has no tun devices (/dev/net/tun)"
    return 2
  fi
  : >"$work/link" # without the "ready" of the case before
  python3 "$here/bad_link.py" "$host_a" "$host_b" bad "$@" >"$work/link" 2>&1 &
  link_pid=$!
  local result=0
  if await 10 link_is_made; then
    ip -n "$host_a" address add 203.0.113.1/24 dev bad
    ip -n "$host_b" address add 203.0.113.2/24 dev bad
    on_both ip -n %h link set bad up
  fi
  if await 5 bad_is_up; then
    interface=bad
    bench --iterations 3 || result=$?
    interface=data
  else
    detail="bad_link.py made no link: $(tail -n 1 "$work/link")"
    result=1
  fi
  end_bad_link
  return "$result"
}

loop_has_begun() { grep -q 'iteration 1 of' "$work/err.0"; }
has_moved() { (($(data_bytes) >= $1)); }

# Ranks that exchange without end, seen to do so.
start_loop() {
  start_ranks bench "${small_layer[@]}" --warmup 0 --iterations 1000000 --timeout "$deadline_s"
  if ! await 10 loop_has_begun || ! await 10 has_moved $(($(data_bytes) + 1000000)); then
    detail="the loop that was to be broken did not begin"
    end_ranks
    return 1
  fi
  broken_ms=$(now_ms)
}

# All ranks but one that was killed ended in time, each with an error that has a type and names a call and a rank.
expect_typed_errors() { # types, rank that they name (default: any), rank that was killed (default: none)
  local rank end_s=$((2 * deadline_s + slack_s)) good=yes heard='' call blamed num_right=0
  # Where the call is named, then in brackets what kind of error it is, and about whom.
  local pattern="^ferry bench: (.*: )?(route|dispatch|combine|Group::create|all_gather)\\b.* \\(($1), rank ([0-9]+)\\)\$"
  await_end "$end_s"
  detail="ended after $(($(now_ms) - broken_ms)) ms"
  for ((rank = 0; rank < num_ranks; ++rank)); do
    if [[ $rank == "${3-}" ]]; then continue; fi
    if [[ ${codes[rank]} != 1 ]]; then
      good=no
      detail+="; rank $rank: exit code ${codes[rank]}"
    elif [[ $(told "$rank") =~ $pattern ]]; then
      call=${BASH_REMATCH[2]} blamed=${BASH_REMATCH[4]}
      heard+="; rank $rank: $call, ${BASH_REMATCH[3]} of $blamed"
      if [[ $blamed == "${2:-$blamed}" ]]; then
        num_right=$((num_right + 1))
      elif [[ $call != all_gather || $blamed != 0 ]]; then
        # Between two calls ranks line up by the bootstrap, which rank 0 leads: whoever is there when rank 0 leaves,
        # because of the same failure, knows no more than that.
        good=no
      fi
    else
      good=no
      detail+="; rank $rank: another error"
    fi
  done
  detail+=$heard
  [[ $good == yes ]] && ((num_right > 0))
}

killed_rank() {
  start_loop || return 1
  kill -KILL "${pids[3]}"
  # At once and silently: otherwise bash prints that a child was killed.
  wait "${pids[3]}" 2>/dev/null || true
  expect_typed_errors 'kPeerLost|kTimeout' 3 3
}

cut() { # links
  local link result=0
  start_loop || return 1
  for link in "$@"; do ip -n "$host_b" link set "$link" down; done
  expect_typed_errors 'kTimeout|kPeerLost|kTransport' || result=1
  raise_links
  return "$result"
}

# Interfaces that lead nowhere: each host's own loopback.
no_way() {
  interface=lo
  broken_ms=$(now_ms)
  start_ranks bench "${small_layer[@]}" --timeout "$deadline_s"
  interface=data
  # Rank 0 is the first to find no way, to the rank of its rail.
  expect_typed_errors 'kTransport|kTimeout|kPeerLost' 2
}

run_case() { # name
  case $1 in
    demo) demo ;;
    bench) bench ;;
    bench-fp8) bench --dtype fp8 --layout experts ;;
    four-nodes) bench --nodes 4 ;;
    delay-2ms) over_bad_link netem delay 2ms ;;
    delay-20ms) over_bad_link netem delay 20ms ;;
    loss-1%) over_bad_link netem loss 1% ;;
    reorder-25%) over_bad_link netem delay 2ms reorder 25% ;;
    slow-link) over_bad_link tbf rate 20mbit burst 32k latency 400ms ;;
    tun-delay-2ms) over_tun --delay-ms 2 ;;
    tun-delay-20ms) over_tun --delay-ms 20 ;;
    tun-loss-1%) over_tun --loss 0.01 ;;
    tun-reorder-25%) over_tun --delay-ms 2 --reorder 0.25 ;;
    killed-rank) killed_rank ;;
    cut-data-link) cut data ;;
    cut-both-links) cut data control ;;
    no-way) no_way ;;
  esac
}

# --- All of it -------------------------------------------------------------------------------------------------------

make_hosts
secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
num_ok=0 num_failed=0 num_skipped=0
for name in "${wanted[@]}"; do
  detail=''
  begin_ms=$(now_ms)
  outcome=0
  run_case "$name" || outcome=$?
  case $outcome in
    0) word=ok && num_ok=$((num_ok + 1)) ;;
    2) word=SKIPPED && num_skipped=$((num_skipped + 1)) ;;
    *) word=FAILED && num_failed=$((num_failed + 1)) ;;
  esac
  printf '%-7s %-15s %5.1f %s\n' "$word" "$name" "$(($(now_ms) - begin_ms))e-3" "$detail"
  if [[ $word == FAILED ]]; then tail -n 5 "$work"/out.* "$work"/err.* | sed 's/^/        /'; fi
done
echo "$num_ok ok, $num_failed failed, $num_skipped skipped, in $SECONDS s"
exit $((num_failed > 0))
