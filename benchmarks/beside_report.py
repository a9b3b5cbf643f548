"""The report of benchmarks/beside.py as text."""

from beside_ways import TITLES

_BYTES_PER_MB = 1e6


def titles_of(line):
    """Name of what a result measures, without its tokens."""
    if line["measure"] == "latency":
        halves = "with hooks" if line["split"] else "whole"
        return f"latency mode, {halves}, {'graph' if line['graph'] else 'eager'}"
    what = "layer, nothing cached" if line["measure"] == "layer" else "pair, routing kept"
    return f"{what}, {line['dtype']}"


def panels_of(result):
    """Results by what they measure, in order."""
    panels = {}
    for line in result["results"]:
        panels.setdefault(titles_of(line), []).append(line)
    return panels


def all_gather_wins(lines):
    """Measurements in which all-gather and reduce-scatter took the least time."""
    wins = []
    for line in lines:
        times = {way: column["us"] for way, column in line["ways"].items() if "us" in column}
        if len(times) > 1 and min(times, key=times.get) == "all_gather":
            others = min(us for way, us in times.items() if way != "all_gather")
            wins.append(
                {"what": titles_of(line), "tokens": line["tokens"], "times_faster": others / times["all_gather"]}
            )
    return wins


def _cell(column):
    if "us" not in column:
        return "failed" if "failed" in column else "-"
    return f"{column['us']:.1f} ({column['us_p50']:.1f})"


def _ways_by(lines, name):
    """The ways by what they have under a name, one element for each result."""
    ways = {}
    for way in lines[0]["ways"]:
        column = tuple(line["ways"].get(way, {}).get(name) for line in lines)
        if any(column):
            ways.setdefault(column, []).append(way)
    return ways


def show(result):
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    where = f"{result['gpu']}, driver {result['driver']}" if result["gpu"] else f"{result['host']['num_cpus']} CPUs"
    print(f"commit {result['commit']}, {where}: {shape}, {result['rounds']} rounds; us, least (median)")
    for way, versions in result["versions"].items():
        print(f"  {TITLES[way]}: " + ", ".join(f"{name} {value}" for name, value in versions.items() if value))
    reasons = {}
    panels = panels_of(result)
    for title, lines in panels.items():
        print(f"\n{title:40}" + "".join(f"{'T = ' + str(line['tokens']):>18}" for line in lines))
        for way in lines[0]["ways"]:
            print(f"  {TITLES[way]:38}" + "".join(f"{_cell(line['ways'].get(way, {})):>18}" for line in lines))
            for line in lines:
                for kind in ("absent", "failed"):
                    if kind in line["ways"].get(way, {}):
                        reasons.setdefault((way, kind, line["ways"][way][kind]), []).append(title)
        for title, name in (("MB, logical", "logical_bytes"), ("MB on the wire", "wire_bytes")):
            groups = _ways_by(lines, name)
            for numbers, ways in groups.items():
                cells = "".join(f"{'-' if one is None else format(one / _BYTES_PER_MB, '.3f'):>18}" for one in numbers)
                print(f"  {title if len(groups) == 1 else title + ': ' + ', '.join(ways):38}{cells}")
    print()
    for (way, kind, reason), titles in reasons.items():
        where = "" if len(set(titles)) == len(panels) else f" ({'; '.join(dict.fromkeys(titles))})"
        print(f"{TITLES[way]}, {kind}{where}: {reason}")
    if any("all_gather" in line["ways"] for line in result["results"]):
        wins = result["all_gather_wins"]
        print(f"all-gather and reduce-scatter took the least time in {len(wins)} of {len(result['results'])} results")
        for win in wins:
            print(f"  {win['what']}, {win['tokens']} tokens: {win['times_faster']:.2f} times as fast as the next")
