"""The report of benchmarks/nodes.py: medians of the rounds, ratios between them, as JSON and as text."""

import statistics
from dataclasses import dataclass, field


@dataclass
class Rounds:
    """What all rounds over one transport measured, one element a round."""

    puts_gbps: dict = field(
        default_factory=lambda: {"one_pair_one_way": [], "one_pair_each_way": [], "all_rails_both_ways": []}
    )
    benches: list = field(default_factory=list)  # reports of `ferry bench`
    stages: list = field(default_factory=list)  # microseconds and GB/s


def summarise(transport, network, rounds):
    """The element of the JSON's "results" for one transport."""
    put_medians = {name: statistics.median(column) for name, column in rounds.puts_gbps.items()}
    stage_us, stage_gbps = (statistics.median(column) for column in zip(*rounds.stages, strict=True))

    def ratios_to_puts(gbps):
        return {name: gbps / put for name, put in put_medians.items()}

    def call(op):
        all_us = [result_of(bench, op)["time_us_p50"] for bench in rounds.benches]
        sent = result_of(rounds.benches[-1], op)["network"]
        time_us = statistics.median(all_us)
        gbps = sent["sent_bytes"] / time_us / 1e3
        return {
            "time_us_p50": time_us,
            "time_us_p50_all": all_us,
            "sent_bytes": sent["sent_bytes"],
            "formula_bytes": sent["formula_bytes"],
            "gbps": gbps,
            "ratios_to_puts": ratios_to_puts(gbps),
            "time_over_network_stage": time_us / stage_us,
        }

    return {
        "transport": transport,
        "network": network,
        "route": rounds.benches[-1]["run"]["network_route"],
        "puts": {name: {"gbps": put_medians[name], "gbps_all": column} for name, column in rounds.puts_gbps.items()},
        "network_stage": {
            "time_us": stage_us,
            "gbps": stage_gbps,
            "gbps_all": [gbps for _, gbps in rounds.stages],
            "ratios_to_puts": ratios_to_puts(stage_gbps),
        },
        "calls": {op: call(op) for op in ("dispatch", "combine")},
    }


def result_of(bench, op):
    return next(result for result in bench["results"] if result["op"] == op)


def show(result):
    print(f"{result['transport']}: {result['network']} ({result['route']})")
    for name, puts in result["puts"].items():
        print(f"  ucx_perftest, {name.replace('_', ' '):20} {puts['gbps']:7.3f} GB/s")
    stage = result["network_stage"]
    print(f"  network stage alone {stage['time_us'] / 1e3:8.1f} ms     {stage['gbps']:7.3f} GB/s = {ratios(stage)}")
    for op, call in result["calls"].items():
        print(
            f"  {op:19} {call['time_us_p50'] / 1e3:8.1f} ms     {call['gbps']:7.3f} GB/s = {ratios(call)}; "
            f"{call['sent_bytes'] / 1e6:.1f} MB, {call['time_over_network_stage']:.2f} of the stage's time"
        )


def ratios(measured):
    if not measured["ratios_to_puts"]:
        return "not compared with puts"
    return " / ".join(f"{ratio:.2f}" for ratio in measured["ratios_to_puts"].values()) + " of those"
