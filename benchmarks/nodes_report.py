"""The report of benchmarks/nodes.py: medians of the rounds, ratios between them, as JSON and as text."""

import statistics
from dataclasses import dataclass, field


@dataclass
class Rounds:
    """What all rounds over one network measured, one element a round."""

    puts_gbps: dict = field(default_factory=dict)  # of ucx_perftest, by name
    calls: dict = field(default_factory=dict)  # by name
    stages: dict = field(default_factory=dict)  # the rings alone, by the name of the call whose bytes they carried
    link_gbps: float | None = None  # what the network is held to, all links together

    def add_puts(self, gbps):
        for name, value in gbps.items():
            self.puts_gbps.setdefault(name, []).append(value)

    def add_call(self, call, stage):
        self.calls.setdefault(call.name, []).append(call)
        self.stages.setdefault(call.name, []).append(stage)


def summarise(transport, network, rounds, bench):
    """The element of the JSON's "results" for one network."""
    alone = {name: statistics.median(column) for name, column in rounds.puts_gbps.items()}

    def ratios(gbps):
        return {
            "ratios_to_puts": {name: gbps / put for name, put in alone.items()},
            "ratio_to_link": gbps / rounds.link_gbps if rounds.link_gbps else None,
        }

    def stage_of(stages):
        gbps = statistics.median(stage.gbps for stage in stages)
        return {
            "time_us": statistics.median(stage.time_us for stage in stages),
            "gbps": gbps,
            "gbps_all": [stage.gbps for stage in stages],
            **ratios(gbps),
        }

    def call_of(calls, stage):
        time_us = statistics.median(call.time_us for call in calls)
        last = calls[-1]
        gbps = last.sent_bytes / time_us / 1e3
        return {
            "time_us_p50": time_us,
            "time_us_p50_all": [call.time_us for call in calls],
            "sent_bytes": last.sent_bytes,
            "formula_bytes": last.formula_bytes,
            "sent_over_formula": last.sent_bytes / last.formula_bytes,
            "gbps": gbps,
            **ratios(gbps),
            "time_over_network_stage": time_us / stage["time_us"],
        }

    stages = {name: stage_of(all_stages) for name, all_stages in rounds.stages.items()}
    return {
        "transport": transport,
        "network": network,
        "route": bench["run"]["network_route"],
        "link_gbps": rounds.link_gbps,
        "puts": {name: {"gbps": alone[name], "gbps_all": column} for name, column in rounds.puts_gbps.items()},
        "network_stages": stages,
        "calls": {name: call_of(calls, stages[name]) for name, calls in rounds.calls.items()},
    }


def show(result):
    print(f"{result['transport']}: {result['network']} ({result['route']})")
    for name, puts in result["puts"].items():
        print(f"  ucx_perftest, {name.replace('_', ' '):28} {puts['gbps']:7.3f} GB/s")
    if result["link_gbps"]:
        print(f"  the link{' ':35}{result['link_gbps']:7.3f} GB/s")
    for name, call in result["calls"].items():
        title = name.replace("_", " ")
        stage = result["network_stages"][name]
        print(f"  {title:14} rings alone {stage['time_us'] / 1e3:8.2f} ms   {rate(stage)}")
        print(
            f"  {title:14} whole call  {call['time_us_p50'] / 1e3:8.2f} ms   {rate(call)}; "
            f"{call['time_over_network_stage']:.2f} of the rings' time, {call['sent_bytes'] / 1e6:.1f} MB, "
            f"{call['sent_over_formula']:.4f} of the formula"
        )


def rate(measured):
    text = f"{measured['gbps']:7.3f} GB/s"
    if measured["ratios_to_puts"]:
        text += " = " + " / ".join(f"{ratio:.2f}" for ratio in measured["ratios_to_puts"].values()) + " of the puts"
    if measured["ratio_to_link"]:
        text += f" = {measured['ratio_to_link']:.2f} of the link"
    return text
