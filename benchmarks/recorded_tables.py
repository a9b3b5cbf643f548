"""Tables of recorded results as Markdown, each from the reports in benchmarks/results alone. tables.py writes them into
the documents.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent / "results"

Row = list[str]
Record = dict[str, Any]


class TableError(Exception):
    """A document names a table that does not exist, or a record lacks a figure."""


@functools.cache
def report(path: str) -> Record:
    return json.loads((RESULTS / path).read_text())


def one(path: str, **where: Any) -> Record:
    """The only result of a report whose fields have these values."""
    found = [result for result in report(path)["results"] if all(result.get(k) == v for k, v in where.items())]
    if len(found) != 1:
        raise TableError(f"{path}: {len(found)} results with {where}, expected one")
    return found[0]


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def us(result: Record, field: str = "time_us_p50") -> str:
    return number(result[field])


def ms(microseconds: float) -> str:
    return f"{number(microseconds / 1000)} ms"


def with_ratio(result: Record) -> str:
    return f"{us(result)}, {result['ratio_to_limit']:.2f}"


def table(header: Iterable[str], rows: Iterable[Row]) -> str:
    lines = [list(header), *rows]
    if any(len(line) != len(lines[0]) for line in lines):
        raise TableError(f"rows of different lengths under {lines[0]}")
    body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(lines[0]), *body[1:]]) + "\n"


LAYER_TOKENS = (64, 128, 512, 1024, 2048, 4096)
LAYER_RUNS = (
    ("4 H200", "python-h200-x4/layer"),
    ("2 H100", "python-h100-x2/layer"),
)


def gpu_layers() -> str:
    def row(machine: str, stem: str, api: str, dtype: str) -> Row:
        path = f"{stem}_{api}_{dtype}.json"
        times = [us(one(path, tokens=tokens), "layer_us") for tokens in LAYER_TOKENS]
        return [machine, f"`{api}`, {dtype}", *times]

    header = ["µs", "package", *(f"T = {tokens}" for tokens in LAYER_TOKENS)]
    runs = [(*run, api, dtype) for run in LAYER_RUNS for api in ("ferry", "deep_ep") for dtype in ("bf16", "fp8")]
    return table(header, [row(*run) for run in runs])


LATENCY_RUNS = (
    ("4 H200", "cuda-h200-x4/latency_pair_fp8.json", "python-h200-x4/latency_kernels_deep_ep.json"),
    ("2 H100", "cuda-h100-x2/latency_pair_fp8.json", "python-h100-x2/latency_kernels_deep_ep.json"),
)


def gpu_latency() -> str:
    def row(machine: str, pairs: str, kernels: str, tokens: int) -> Row:
        pair = one(pairs, op="latency-pair", tokens=tokens)
        times = one(kernels, tokens=tokens)["kernel_times"]
        others = one(pairs, op="route+dispatch+combine", tokens=tokens)
        return [
            machine,
            str(tokens),
            number(times["dispatch"]["call_us"]),
            number(times["combine"]["call_us"]),
            us(pair),
            us(pair, "graph_time_us_p50"),
            f"{pair['ratio_to_limit']:.2f}",
            us(others),
        ]

    header = ["µs", "T", "dispatch kernel", "combine kernel", "pair", "pair in a graph", "ratio", "three calls"]
    return table(header, [row(*run, tokens) for run in LATENCY_RUNS for tokens in (1, 8, 32, 128)])


def gpu_hooks() -> str:
    def of_two(tokens: int) -> Row:
        path = "cuda-h200-x2/latency_words_before_after.json"
        calls = [one(path, halves=halves, late_weights=False, tokens=tokens)["new"] for halves in (False, True)]
        return [number(call[time]) for time in ("pair_us", "graph_us") for call in calls]

    def of_four(tokens: int) -> Row:
        paths = ("cuda-h200-x4/latency_pair_whole.json", "cuda-h200-x4/latency_pair_halves.json")
        pairs = [one(path, op="latency-pair", tokens=tokens) for path in paths]
        return [us(pair, time) for time in ("time_us_p50", "graph_time_us_p50") for pair in pairs]

    columns = ("pair", "in halves", "in a graph", "in halves in a graph")
    header = ["T", *(f"{gpus}: {column}" for gpus in ("2 H200", "4 H200") for column in columns)]
    rows = [[str(tokens), *of_two(tokens), *of_four(tokens)] for tokens in (1, 8, 32, 64, 128)]
    return table(header, rows)


BESIDE_WAYS = {
    "ferry": "`ferry`",
    "deep_ep": "`deep_ep` of Ferry",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
}


def gpu_beside() -> str:
    results = report("python-h200-x2/beside_quick.json")["results"]

    def name(result: Record) -> str:
        if result["measure"] != "latency":
            what = "layer, new route" if result["measure"] == "layer" else "layer, route kept"
            return f"{what}, {result['dtype']}"
        return f"latency pair, {'hooks' if result['split'] else 'whole'}, {'graph' if result['graph'] else 'eager'}"

    rows = [
        [name(result), str(result["tokens"])]
        + [number(result["ways"][way]["us"]) if "us" in result["ways"][way] else "" for way in BESIDE_WAYS]
        for result in results
    ]
    return table(("step", "T", *BESIDE_WAYS.values()), rows)


CALLS = [
    (*call, memory)
    for memory in ("symmetric", "plain")
    for call in (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
]


def gpu_calls() -> str:
    h200, h100 = "cuda-h200-x4", "cuda-h100-x2"

    def six(folder: str, fp8: str, bf16: str, fp8_plain: str, bf16_plain: str, combine_plain: str = "") -> list[str]:
        """Reports in the order of CALLS. An empty name: not recorded."""
        names = (fp8, bf16, bf16, fp8_plain, bf16_plain, combine_plain or bf16_plain)
        return [f"{folder}/{name}.json" if name else "" for name in names]

    def of_shape(stem: str) -> list[str]:
        return six(h200, *(f"{stem}_{name}" for name in ("fp8", "bf16", "fp8_plain", "bf16_plain")))

    two = [
        f"two_ranks_{name}" for name in ("fp8_symmetric", "bf16_symmetric", "fp8_plain", "bf16_plain", "combine_plain")
    ]
    runs = [
        *(("4 H200", f"T = {tokens}", of_shape("tokens"), tokens) for tokens in (512, 1024)),
        ("4 H200", "T = 4096", six(h200, "dispatch_fp8", "pair_bf16", "dispatch_fp8_plain", "pair_bf16_plain"), 4096),
        ("4 H200", "T = 8192", of_shape("tokens"), 8192),
        ("4 H200", "T = 4096, H = 2048", of_shape("hidden_2048"), 4096),
        ("4 H200", "T = 4096, H = 4096", of_shape("hidden_4096"), 4096),
        ("4 H200", "T = 4096, zipf routing", of_shape("routing_zipf"), 4096),
        ("2 of these", "T = 4096", six(h200, *two), 4096),
        ("2 H100", "T = 512", six(h100, "dispatch_fp8", "pair_bf16", "", "plain_bf16"), 512),
        ("2 H100", "T = 4096", six(h100, "dispatch_fp8", "pair_bf16", "plain_fp8", "plain_bf16"), 4096),
        ("2 H100", "T = 4096, H = 2048", six(h100, "hidden_2048_fp8", "hidden_2048", "", ""), 4096),
    ]

    def row(machine: str, shape: str, reports: list[str], tokens: int) -> Row:
        cells = [
            with_ratio(one(path, op=op, dtype=dtype, tokens=tokens)) if path else ""
            for path, (op, dtype, _) in zip(reports, CALLS, strict=True)
        ]
        return [machine, shape, *cells]

    header = [f"{op} {dtype}{', plain' if memory == 'plain' else ''}" for op, dtype, memory in CALLS]
    return table(("µs", "shape", *header), [row(*run) for run in runs])


def gpu_route() -> str:
    runs = (
        ("4 H200", "cuda-h200-x4/route.json"),
        ("2 H100", "cuda-h100-x2/route.json"),
    )

    def cell(path: str, tokens: int) -> str:
        result = one(path, op="route", tokens=tokens)
        return f"{us(result)}, {us(result, 'events_time_us_p50')}"

    tokens = (64, 512, 4096)
    rows = [[machine, *(cell(path, count) for count in tokens)] for machine, path in runs]
    return table(("µs", *(f"T = {count}" for count in tokens)), rows)


CARD_CALLS = (("pair_bf16", "dispatch"), ("pair_bf16", "combine"), ("dispatch_fp8", "dispatch"))
CARD_SHAPES = (("2 of 1", "x4/card_2x1"), ("2 of 2", "x4/card_2x2"))


def card_calls() -> str:
    def cell(stem: str, name: str, op: str, tokens: int) -> str:
        result = one(f"cuda-nodes-h200-{stem}_{name}_{tokens}.json", op=op)
        return f"{us(result)}, {result['network']['ratio_to_wire']:.2f}"

    def row(tokens: int) -> Row:
        return [str(tokens), *(cell(stem, *call, tokens) for _, stem in CARD_SHAPES for call in CARD_CALLS)]

    header = [f"{nodes}: {call}" for nodes, _ in CARD_SHAPES for call in ("dispatch bf16", "combine", "dispatch fp8")]
    return table(("T", *header), [row(tokens) for tokens in (64, 512, 1024, 4096)])


def card_latency() -> str:
    def cells(ranks: str, tokens: int) -> Row:
        path = f"cuda-nodes-h200-x4/card_{ranks}_latency_{tokens}.json"
        calls = [us(one(path, op=f"latency-{op}")) for op in ("dispatch", "combine", "pair")]
        return [*calls, us(one(path, op="latency-pair"), "graph_time_us_p50")]

    header = [f"{nodes}: {call}" for nodes, _ in CARD_SHAPES for call in ("dispatch", "combine", "pair", "in a graph")]

    def row(tokens: int) -> Row:
        return [str(tokens), *(cell for ranks in ("2x1", "2x2") for cell in cells(ranks, tokens))]

    return table(("T", *header), [row(tokens) for tokens in (1, 8, 32, 128)])


def card_small() -> str:
    most_word_tokens = 32

    def cells(record: str, tokens: int) -> Row:
        rows = "" if tokens <= most_word_tokens else "_rows"
        stem = f"cuda-nodes-h200-x2/card_2x1_{record}{rows}_latency"
        pair = one(f"{stem}.json", op="latency-pair", tokens=tokens)
        late = one(f"{stem}_late.json", op="latency-pair", tokens=tokens)
        calls = [us(one(f"{stem}.json", op=f"latency-{op}", tokens=tokens)) for op in ("dispatch", "combine")]
        return [*calls, us(pair), us(pair, "graph_time_us_p50"), us(late, "graph_time_us_p50")]

    calls = ("dispatch", "combine", "pair", "in a graph", "late weights, in a graph")
    header = [f"{state}: {call}" for state in ("before", "now") for call in calls]

    def row(tokens: int) -> Row:
        return [str(tokens), *cells("before_small", tokens), *cells("small", tokens)]

    return table(("T", *header), [row(tokens) for tokens in (1, 8, 16, 32, 64, 128)])


# Predictions of `ferry plan` with rates of an earlier state of the calls, which no report has. By ranks and T: µs of a
# bf16 dispatch, a combine and an fp8 dispatch, or of a pair of latency mode in a graph.
PREDICTED_CALLS = {
    "2x1": {64: (104, 103, 77), 512: (193, 197, 165), 1024: (343, 347, 198), 4096: (1226, 1226, 659)},
    "2x2": {64: (104, 112, 77), 512: (193, 206, 165), 1024: (343, 356, 198), 4096: (1226, 1235, 659)},
}
PREDICTED_PAIRS = {"2x1": {1: 77, 8: 93, 32: 108, 128: 169}, "2x2": {1: 80, 8: 98, 32: 128, 128: 245}}


def predicted_and_measured(predicted: int, measured: float) -> str:
    cell = f"{predicted:,} → {measured:,.0f}"
    return f"**{cell}**" if abs(predicted / measured - 1) >= 0.15 else cell


def plan_calls() -> str:
    def cell(ranks: str, tokens: int, name: str, op: str, predicted: int) -> str:
        result = one(f"cuda-nodes-h200-x4/card_{ranks}_{name}_{tokens}.json", op=op)
        return predicted_and_measured(predicted, result["time_us_p50"])

    rows = [
        [
            ranks,
            str(tokens),
            *(cell(ranks, tokens, *call, figure) for call, figure in zip(CARD_CALLS, figures, strict=True)),
        ]
        for ranks, by_tokens in PREDICTED_CALLS.items()
        for tokens, figures in by_tokens.items()
    ]
    return table(("ranks", "T", "dispatch bf16", "combine", "dispatch fp8"), rows)


def plan_pairs() -> str:
    def cell(ranks: str, tokens: int, predicted: int) -> str:
        result = one(f"cuda-nodes-h200-x4/card_{ranks}_latency_{tokens}.json", op="latency-pair")
        return predicted_and_measured(predicted, result["graph_time_us_p50"])

    rows = [
        [ranks, *(cell(ranks, *figure) for figure in figures.items())] for ranks, figures in PREDICTED_PAIRS.items()
    ]
    return table(("ranks", *(f"T = {tokens}" for tokens in PREDICTED_PAIRS["2x1"])), rows)


def gpu_networks() -> str:
    def row(network: str, result: Record) -> Row:
        puts = result["puts"].get("chunks_one_pair_each_way", {}).get("gbps") or result["link_gbps"]
        calls = result["calls"]
        stage = result["network_stages"]["dispatch_bf16"]["gbps"]
        cells = [
            f"{ms(call['time_us_p50'])}, {call['time_over_network_stage']:.2f}"
            for call in (calls["dispatch_bf16"], calls["combine_bf16"], calls["dispatch_fp8"])
        ]
        return [network, f"{puts:.2f}", f"{stage:.2f}", *cells]

    names = ("loopback interface, TCP", "UCX shared memory", "copy at 10 Gbit/s", "copy at 20 Gbit/s")
    rows = [row(*pair) for pair in zip(names, report("cuda-nodes-h200-x2/nodes.json")["results"], strict=True)]
    return table(("network", "alone", "rings", "dispatch bf16", "combine", "dispatch fp8"), rows)


def one_sided() -> str:
    def row(num_bytes: int) -> Row:
        cells = []
        for op in ("put", "get"):
            result = one(f"cuda-h100-x2/one_sided_{op}.json", num_bytes=num_bytes)
            ours, plain = result["latency_p50_ns"], result["plain_latency_p50_ns"]
            cells += [f"{ours / 1000:.2f}", f"{plain / 1000:.2f}", f"{plain / ours:.2f}"]
        return [f"{num_bytes:,}", *cells]

    header = ("bytes", "put and signal, one way", "plain", "plain / this", "get", "plain", "plain / this")
    return table(header, [row(num_bytes) for num_bytes in (8, 8192, 65536, 1048576)])


CPU_MACHINES = (
    ("2 cores", "cpu-xeon-2-cores"),
    ("2 cores, newer", "cpu-newer-xeon-2-cores"),
    ("16 cores", "cpu-xeon-16-cores"),
)


def cpu_calls() -> str:
    def row(machine: str, folder: str, name: str, op: str) -> Row:
        (result,) = [result for result in report(f"{folder}/{name}.json")["results"] if result["op"] == op]
        plain = f", plain, T = {result['tokens']}" if name == "pair_plain" else ""
        call = op if op == "route" else f"{op} {result['dtype']}{plain}"
        figures = ["", "", ""]
        if result["limit_gbps"]:
            rates = (result["logical_gbps"], result["limit_gbps"], result["ratio_to_limit"])
            figures = [f"{rate:.2f}" for rate in rates]
        return [machine, call, ms(result["time_us_p50"]), ms(result["time_us_p99"]), *figures]

    calls = (
        ("route", "route"),
        ("pair_bf16", "dispatch"),
        ("pair_bf16", "combine"),
        ("pair_fp8", "dispatch"),
        ("pair_plain", "dispatch"),
        ("pair_plain", "combine"),
    )
    rows = [row(*machine, *call) for machine in CPU_MACHINES for call in calls]
    return table(("machine", "call", "p50", "p99", "GB/s a rank", "limit", "ratio"), rows)


def cpu_growth() -> str:
    machines = [machine for machine in CPU_MACHINES if machine[0] != "2 cores, newer"]

    def cell(folder: str, op: str, tokens: int) -> str:
        result = one(f"{folder}/sweep.json", op=op, tokens=tokens)
        return f"{ms(result['time_us_p50'])}, {result['ratio_to_limit']:.2f}"

    columns = [(folder, op) for _, folder in machines for op in ("dispatch", "combine")]
    header = ["T", *(f"{op}, {machine}" for machine, _ in machines for op in ("dispatch", "combine"))]
    tokens = (512, 2048, 4096, 16384)
    return table(header, [[str(count), *(cell(*column, count) for column in columns)] for count in tokens])


def cpu_networks() -> str:
    two, many = "cpu-nodes-xeon-2-cores", "cpu-nodes-xeon-32-cores"
    tcp, shm = "the loopback interface, TCP", "UCX shared memory"
    runs = (
        ("veth pair at 1 Gbit/s each way, TCP", f"{two}/link_1000_mbit.json", "tcp"),
        ("veth pair at 2 Gbit/s each way, TCP", f"{two}/link_2000_mbit.json", "tcp"),
        (tcp, f"{two}/loopback.json", "tcp"),
        (shm, f"{two}/loopback.json", "shm"),
        (f"32 cores: {tcp}", f"{many}/loopback.json", "tcp"),
        (f"32 cores: {shm}", f"{many}/loopback.json", "shm"),
    )

    def row(name: str, path: str, transport: str) -> Row:
        result = one(path, transport=transport)
        puts = [result["puts"][way]["gbps"] for way in ("one_pair_each_way", "all_rails_both_ways")]
        stage = result["network_stage"]["gbps"]
        calls = [result["calls"][op]["time_over_network_stage"] for op in ("dispatch", "combine")]
        rates = [f"{rate:.2f}" if rate < 10 else number(rate) for rate in (*puts, stage)]
        return [name, *rates, *(f"{ratio:.2f}" for ratio in calls)]

    header = ("network", "puts: one pair each way", "four pairs", "stage", "dispatch / stage", "combine / stage")
    return table(header, [row(*run) for run in runs])


def cpu_bytes() -> str:
    def row(nodes: int) -> Row:
        cells = []
        for op in ("dispatch", "combine"):
            result = one(f"cpu-nodes-xeon-2-cores/nodes_{nodes}x2.json", op=op)
            network = result["network"] or {"sent_bytes": 0, "formula_bytes": 0}
            sent, formula = (network[name] / result["ranks"] / 1e6 for name in ("sent_bytes", "formula_bytes"))
            cells += [ms(result["time_us_p50"]), f"{sent:.2f}", f"{formula:.2f}"]
        return [str(nodes), *cells]

    header = ("nodes", "dispatch", "MB a rank", "formula", "combine", "MB a rank", "formula")
    return table(header, [row(nodes) for nodes in (1, 2, 4, 8)])


def collectives() -> str:
    runs = (
        ("8 CPU ranks, gloo", "python-xeon-2-cores/bench.json"),
        ("2 H200, nccl", "python-h200-x2/bench_2_ranks.json"),
    )

    def row(machine: str, path: str, op: str) -> Row:
        result = one(path, op=op)
        ours, other = result["ferry_ms"] * 1000, result["all_to_all_ms"] * 1000
        unit = ms if ours > 10_000 else lambda time: f"{number(time)} µs"
        return [machine, op, unit(ours), unit(other), f"{result['times_faster']:.1f}"]

    rows = [row(*run, op) for run in runs for op in ("dispatch", "combine")]
    return table(("ranks", "call", "Ferry", "`all_to_all_single` with its permutation", "ratio"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "card-calls": card_calls,
    "card-latency": card_latency,
    "card-small": card_small,
    "collectives": collectives,
    "cpu-bytes": cpu_bytes,
    "cpu-calls": cpu_calls,
    "cpu-growth": cpu_growth,
    "cpu-networks": cpu_networks,
    "gpu-beside": gpu_beside,
    "gpu-calls": gpu_calls,
    "gpu-hooks": gpu_hooks,
    "gpu-latency": gpu_latency,
    "gpu-layers": gpu_layers,
    "gpu-networks": gpu_networks,
    "gpu-route": gpu_route,
    "one-sided": one_sided,
    "plan-calls": plan_calls,
    "plan-pairs": plan_pairs,
}
