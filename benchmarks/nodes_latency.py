"""`benchmarks/nodes.py --latency`: calls of latency mode over several nodes against what they take on one, and the
network's one-way trips.

A call over nodes cannot take less than one on one node, nor hand over its rows without a trip. It should not take more
than the call on one node and TRIPS_PER_CALL trips of a long message and the word behind it: half of a `put_signal` of
1 MiB there and back (`ferry bench --op put`), between two ranks of two nodes, over the same network in the same run.
The same with 8 bytes is printed beside it, which is what the network takes for small batches.
"""

import statistics
import sys
from dataclasses import dataclass, field

TRIPS_PER_CALL = 3
SHORT_BYTES, LONG_BYTES = 8, 1 << 20
# Calls of latency mode in each operation that is reported.
CALLS = {"latency-dispatch": 1, "latency-combine": 1, "latency-pair": 2}


@dataclass
class LatencyRounds:
    """What all rounds over one network measured, one element a round."""

    one_node: list = field(default_factory=list)  # times by operation and tokens
    nodes: list = field(default_factory=list)
    trips: list = field(default_factory=list)  # times by bytes


def times_of(bench):
    """µs by operation and tokens, of a report of `ferry bench`."""
    return {(r["op"], r["tokens"]): r["time_us_p50"] for r in bench["results"] if r["op"] in CALLS}


def trips_of(bench):
    """µs one way by bytes, of a report of `ferry bench --op put`."""
    return {r["num_bytes"]: r["latency_p50_ns"] / 1e3 for r in bench["results"]}


def measure_latency(options, ranks, name):
    """All rounds, and the last report of calls over nodes."""
    rounds = LatencyRounds()
    for round_idx in range(options.rounds):
        where = f"{name}: round {round_idx + 1} of {options.rounds}"
        print(f"{where}: one node", file=sys.stderr)
        rounds.one_node.append(times_of(ranks.latency_on_one_node()))
        print(f"{where}: nodes", file=sys.stderr)
        bench = ranks.latency_over_nodes()
        rounds.nodes.append(times_of(bench))
        print(f"{where}: trips", file=sys.stderr)
        rounds.trips.append(trips_of(ranks.trips()))
    return rounds, bench


def median_of(columns, key):
    return statistics.median(column[key] for column in columns)


def summarise_latency(transport, network, rounds, bench):
    """The element of the JSON's "results" for one network."""
    trips_us = {num_bytes: median_of(rounds.trips, num_bytes) for num_bytes in sorted(rounds.trips[0])}

    def result_of(op, tokens):
        one_node_us, nodes_us = (median_of(columns, (op, tokens)) for columns in (rounds.one_node, rounds.nodes))
        num_trips = TRIPS_PER_CALL * CALLS[op]
        with_short_us, allowed_us = (one_node_us + num_trips * trips_us[b] for b in (SHORT_BYTES, LONG_BYTES))
        return {
            "op": op,
            "tokens": tokens,
            "one_node_us": one_node_us,
            "nodes_us": nodes_us,
            "nodes_us_all": [column[op, tokens] for column in rounds.nodes],
            "num_trips": num_trips,
            "with_short_trips_us": with_short_us,
            "allowed_us": allowed_us,
            "ratio_to_allowed": nodes_us / allowed_us,
        }

    return {
        "transport": transport,
        "network": network,
        "route": bench["run"]["network_route"],
        "trips_us": {str(num_bytes): us for num_bytes, us in trips_us.items()},
        "calls": [result_of(*key) for key in rounds.nodes[0]],
    }


def show_latency(result):
    print(f"{result['transport']}: {result['network']} ({result['route']})")
    trips = ", ".join(f"{num_bytes} B {us:.1f}" for num_bytes, us in result["trips_us"].items())
    print(f"  one way, in us: {trips}")
    print(f"  {'in us':17}{'T':>5}{'one node':>11}{'nodes':>10}{'+ short trips':>15}{'+ long trips':>14}{'of that':>9}")
    for call in result["calls"]:
        print(
            f"  {call['op']:17}{call['tokens']:5}{call['one_node_us']:11.1f}{call['nodes_us']:10.1f}"
            f"{call['with_short_trips_us']:15.1f}{call['allowed_us']:14.1f}{call['ratio_to_allowed']:9.2f}"
        )
