# SPDX-License-Identifier: MIT
"""Generates tables for the serving loop's arms, and for elastic and stock vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from readme_cache import runs
from readme_format import ROOT, Result, number, rows, table, title

from pyvmem.layouts.options import page_name
from vmem_bench.sglang import tables as sglang
from vmem_bench.vllm import picture

AIMS = {
    "tokens": "tokens/s",
    "between99": "p99 inter-token latency",
    "host": "host time in the cache manager",
    "batch": "mean batch",
    "full": "mean batch while others wait",
}
# The arms, in the order of benchmarks/serve/README.md.
ARMS = (
    *("contiguous", "again", "fa3", "256K", "2M", "paged16", "paged128", "static"),
    *("fa2", "flashinfer", "flashinfer16", "vllm"),
)
ENGINES = ("stock", "elastic", "stock again")
_GB = 1e9


def arrivals(options: Result) -> str:
    """Describes the arrival pattern of a serving run's requests."""
    if options["workload"] == "offline":
        return "all arriving at the start"
    if options["workload"] == "azure":
        times = options["speed_up"]
        return "at the trace's times" + (f", {times:g} times as fast" if times != 1 else "")
    return f"{options['rate']:g} requests/s"


def on_ranks(options: Result) -> str:
    """Describes a run's ranks and layers per tensor unless they are 1, and an unusual page size."""
    ranks, group = options.get("ranks", 1), options.get("group", 1)
    words = f" on each of {ranks} ranks" if ranks > 1 else ""
    words += f", {group} layers per tensor" if group > 1 else ""
    page = options["page"] >> 10
    return words + (f", {page} KB pages" if page not in (64, 2048) else "")


def driver_line(found: dict[str, Result], part: str, arm: str) -> str:
    """Returns a sentence about the driver calls of one rank."""

    def value(what: str) -> float:
        return float(found[f"{part}/{what}/{arm}"]["value"])

    both = value("critical_driver") + value("background_driver")
    return (
        f"`{arm}`: {value('driver_calls'):,.0f} driver calls per rank took "
        f"{both / 1e3:.1f} s, {1e3 * both / value('driver_calls'):.0f} us per call; of the run's "
        f"{value('makespan'):.1f} s, steps spent {value('wait') / 1e3:.1f} s waiting for memory."
    )


def serving_row(found: dict[str, Result], part: str, arm: str) -> list[str]:
    """Returns an arm's row; cells without a recorded value are empty."""

    def cell(key: str, form: str, per: float = 1) -> str:
        row = found.get(f"{part}/{key}/{arm}")
        return "" if row is None else format(row["value"] / per, form)

    return [
        f"`{arm}`",
        cell("tokens", ",.0f"),
        cell("batch", ".1f"),
        *(cell(key, ",.0f") for key in ("first50", "first99", "between99")),
        *(cell(key, ".1f", _GB) for key in ("held", "used")),
        cell("host", ",.0f"),
    ]


def part_serving(_: list[Result]) -> list[str]:
    """Returns a table for each committed run of the serving loop, with a row per arm."""
    lines: list[str] = []
    for run in runs("serve"):
        found, options = rows(run), run["options"]
        head = ["", "tokens/s", "batch", "time to first token p50 ms", "p99", "inter-token p99 ms"]
        for part in run["parts"]:
            ran = [arm for arm in ARMS if f"{part}/tokens/{arm}" in found]
            arms = [arm for arm in ran if not found[f"{part}/makespan/{arm}"].get("cut")]
            lines += [
                f"{options['served']} requests ({options['trace'] or 'synthetic'}), "
                f"{arrivals(options)}; {options['model']}'s shape, "
                f"{options['kv_bytes'] / 2**30:.0f} GiB for keys and values"
                f"{on_ranks(options)}, {title(run)}:",
                "",
                *table(
                    [*head, "GB held by requests", "GB used by rows", "host us per step"],
                    [serving_row(found, part, arm) for arm in arms],
                ),
                "",
            ]
            cut = [f"`{arm}`" for arm in ran if arm not in arms]
            if cut:
                lines += [f"The run's time limit passed before {', '.join(cut)} finished.", ""]
            if options.get("ranks", 1) > 1:
                lines += [driver_line(found, part, arms[0]), ""]
            missed: dict[str, list[str]] = {}
            for aim in run["aims"]:
                if aim["pass"] is False:
                    what, _, base = aim["id"].partition("_")
                    missed.setdefault(base, []).append(f"{AIMS[what]} {aim['value']:.3f}")
            if missed:
                words = (f"relative to `{base}`, {', '.join(m)}" for base, m in missed.items())
                lines += [f"Targets **missed** by `{arms[0]}`: {'; '.join(words)}.", ""]
    return lines[:-1]


def load_table(run: Result) -> Iterator[str]:
    """Yields the table of throughput and latency by request rate."""
    found, options = rows(run), run["options"]
    body = []
    for rate in options["rates"]:
        name = f"{rate:g}"
        if f"load/rate/{name}/stock" not in found:
            continue
        base = found[f"load/rate/{name}/stock"]["value"]
        prefix = f"load/rate/{name}/"
        for engine in [row.removeprefix(prefix) for row in found if row.startswith(prefix)]:
            speed = found[f"{prefix}{engine}"]["value"]
            first, gap = (found[f"load/{kind}/{name}/{engine}"] for kind in ("first", "gap"))
            same = found[f"load/same/{name}/{engine}"]
            body.append(
                [
                    f"{name} per second" if rate else "all at once",
                    engine,
                    f"{speed:,.0f}",
                    f"{speed / base:.3f}",
                    *(number(one[key]) for one in (first, gap) for key in ("median", "p99")),
                    f"{same['value']} of {same['of']}",
                ]
            )
    head = ["requests", "engine", "tokens/s", "relative to stock", "time to first token p50 ms"]
    split = "".join(
        f"{kind} parallel on {count} GPUs, "
        for kind in ("tensor", "pipeline")
        if (count := options.get(f"{kind}_parallel", 1)) > 1
    )
    pages = ""  # older results do not have the size that the engine chose
    if "pages" in options:
        pages = f" on pages of {page_name(options['pages']['elastic'])}"
    yield (
        f"vLLM {options['vllm']}, {options['shape']}'s shape, {split}"
        f"blocks of {options['block_size']} tokens{pages}, {title(run)}:"
    )
    yield ""
    head += ["p99", "inter-token p50 ms", "p99", "answers identical to stock's"]
    yield from table(head, body)
    if "load/rest/mapped" not in found:
        return
    yield ""
    peak, rest, after = (
        found[f"load/{key}"]["value"] for key in ("peak", "rest/mapped", "rest/seconds")
    )
    yield (
        f"The elastic engine had up to {peak / _GB:.1f} GB mapped during the load, and "
        f"{rest / 2**20:.0f} MiB {after:.1f} s after its last request."
    )
    kept = [row for name, row in found.items() if name.startswith("load/rank/kept/")]
    if len(kept) > 1:
        alike = len({row["maps"] for row in kept}) == 1
        yield ""
        yield (
            f"{len(kept)} ranks, each on a separate GPU. With prefixes kept after the last load, "
            f"{' and '.join(number(row['value'] / _GB) for row in kept)} GB were mapped on them, "
            f"{'at' if alike else 'not at'} the same pages of the same tensors."
        )


def heading(run: Result) -> str:
    """Returns the line above a table: version, shape, machine and commit."""
    options = run["options"]
    return (
        f"vLLM {options['vllm']}, {options['shape']}'s shape, {title(run)}, "
        f"commit {run['machine']['commit'][:7]}:"
    )


def idle_table(run: Result) -> Iterator[str]:
    """Yields the table for an idle engine, with the memory it withholds from other processes."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}

    def times(row: str) -> list[str]:
        at = found.get(f"first/{row}")
        return [number(at["median"]), number(at["p99"])] if at else ["", ""]

    yield f"An idle engine; {heading(run)}"
    yield ""
    yield from table(
        ["engine", "requests/s", "time to first token p50 ms", "p99"],
        [
            [engine, f"{found[f'rate/{engine}']['value']:.1f}", *times(engine)]
            for engine in ("stock", "elastic")
            if f"rate/{engine}" in found
        ],
    )
    yield ""
    live, mapped, slabs = (found[name]["value"] for name in ("live", "mapped", "slabs"))
    text = (
        f"When idle, {live / _GB:.2f} GB of pages hold a prefix, {mapped / _GB:.2f} GB are mapped, "
        f"and {slabs / _GB:.2f} GB are allocated from the device"
    )
    if "kv" in found:
        held, settled = found["kv"], found["settled"]["value"]
        text += (
            f"; the KV cache withholds {held['value'] / _GB:.2f} GB from other processes, "
            f"{held['over_live']:.3f} of the live bytes, {settled:.2f} s after the last request"
        )
    yield text + "."
    if "others/usable" in found:
        need, granted, usable = (
            found[f"others/{name}"]["value"] for name in ("bytes", "granted", "usable")
        )
        yield (
            f"Another process requested {need / _GB:.1f} GB from the ledger. The request was "
            f"granted after {granted:.2f} s, and the memory was allocated after {usable:.2f} s."
        )


def share_table(run: Result) -> Iterator[str]:
    """Yields the table for engines that share memory and have alternating bursts."""
    found, options = rows(run), run["options"]
    body = []
    for arm in ("shared", "static", "alone"):
        if f"share/first/{arm}" not in found:
            continue
        first, gap = found[f"share/first/{arm}"], found[f"share/gap/{arm}"]
        done = [
            row["value"] for name, row in found.items() if name.startswith(f"share/done/{arm}/")
        ]
        body.append(
            [
                arm,
                *(number(first[key]) for key in ("mean", "median", "p99")),
                *(number(gap[key]) for key in ("median", "p99")),
                f"{sum(done):,}",
                str(first["rounds"]),
            ]
        )
    bursts = "bursts from the trace" if options["bursts"] == "trace" else "ramps"
    most = "at" if options["bursts"] == "trace" else "to"
    yield (
        f"{options['engines']} engines, {bursts} {most} {options['rate']:g} requests/s, "
        f"{found['share/capacity']['value'] / 2**30:.0f} GiB for all engines; {heading(run)}"
    )
    yield ""
    head = ["engines", "time to first token mean ms", "p50", "p99", "inter-token p50 ms", "p99"]
    yield from table([*head, "requests per round", "rounds"], body)
    yield ""
    yield f"![Memory over time, and time to first token]({picture_of(run)})"


def picture_of(run: Result) -> str:
    """Returns the path of a run's picture."""
    return f"benchmarks/vllm/{Path(run['file']).stem}.svg"


def pictures() -> dict[Path, Result]:
    """Returns the paths of the pictures that show memory over time, each with its run."""
    drawn = [run for run in runs("vllm") if not run["parts"].keys().isdisjoint(picture.PARTS)]
    return {ROOT / picture_of(run): run for run in drawn}


def blocks_table(run: Result) -> Iterator[str]:
    """Yields the table that compares blocks of two sizes."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    sizes = sorted({int(name.rpartition("/")[2]) for name in found if name.startswith("rate/")})
    loads = dict.fromkeys(
        name.partition("/")[2].rpartition("/")[0] for name in found if name.startswith("rate/")
    )
    body = []
    for load in loads:
        cells = [found[f"rate/{load}/{size}"]["value"] for size in sizes]
        gaps = [found.get(f"gap/{load}/{size}") for size in sizes]
        body.append(
            [
                load.replace("prompts/", "prompts, ").replace("decode/", "decoding, "),
                *(f"{one:,.0f}" for one in cells),
                f"{cells[-1] / cells[0]:.3f}",
                *(number(one["median"]) if one else "" for one in gaps),
            ]
        )
    for what, label in (("live", "GB that hold a prefix"), ("mapped", "GB mapped when idle")):
        values = [found.get(f"{what}/{size}") for size in sizes]
        if all(values):
            sums = (f"{one['value'] / _GB:.2f}" for one in values if one)
            body.append([label, *sums, "", "", ""])
    yield f"Blocks of two sizes on {run['options']['page'] >> 10} KB pages; {heading(run)}"
    yield ""
    words = [f"blocks of {size}" for size in sizes]
    yield from table(["tokens/s", *words, "ratio", *(f"ms per token, {w}" for w in words)], body)


def rough_table(run: Result) -> Iterator[str]:
    """Yields the table for requests that are aborted at random, with resets and trims."""
    found = rows(run)
    body = []
    for engine in ENGINES:
        done, same = found.get(f"rough/finished/{engine}"), found.get(f"rough/same/{engine}")
        if done is None:
            continue
        counts = (done["value"], *(done[key] for key in ("aborted", "resets", "trims", "steps")))
        equal = f"{same['value']:,} of {same['of']:,}" if same else ""
        body.append([engine, *(f"{one:,}" for one in counts), equal])
    kernels = ", batch-invariant kernels" if run["options"].get("batch_invariant") else ""
    yield f"Requests that arrive and are aborted at random{kernels}; {heading(run)}"
    yield ""
    head = ["engine", "answered", "aborted", "prefixes reset", "memory trimmed", "steps"]
    yield from table([*head, "answers identical to stock's"], body)
    if "rough/blocks/stored" in found:
        stored, loaded, dropped = (
            found[f"rough/blocks/{what}"]["value"] for what in ("stored", "loaded", "dropped")
        )
        size = run["options"]["offload"] / _GB
        yield ""
        yield (
            f"The elastic engine had {size:.1f} GB of host memory: it stored {stored:,} blocks, "
            f"loaded {loaded:,} and dropped {dropped:,}."
        )


def sleep_table(run: Result) -> Iterator[str]:
    """Yields the table that shows the cost of sleeping and waking."""
    found = rows(run)
    body = []
    for engine in ("elastic", "stock"):
        if f"sleep/wake/{engine}" not in found:
            continue
        slept, woke = (found[f"sleep/{key}/{engine}"] for key in ("sleep", "wake"))
        given = found[f"sleep/given/{engine}"]["value"]
        same = found[f"sleep/same/{engine}"]
        body.append(
            [
                engine,
                *(number(value / 1e3) for value in (slept["max"], slept["min"], woke["median"])),
                number(found[f"sleep/first/{engine}"]["median"]),
                f"{given / _GB:.1f}",
                f"{same['value']} of {same['of']}",
            ]
        )
    head = ["engine", "longest `sleep(1)` s", "shortest s", "`wake_up()` s"]
    head += ["then time to first token ms", "GB freed", "answers identical to those before"]
    yield heading(run)
    yield ""
    yield from table(head, body)


def limit_table(run: Result) -> Iterator[str]:
    """Yields the table for a limit that is lowered while requests run."""
    found = {name.partition("/")[2]: row["value"] for name, row in rows(run).items()}
    options = run["options"]
    yield (
        f"A limit lowered on every device while {found['requests']:,.0f} requests run, tensor "
        f"parallel on {options['tensor_parallel']} GPUs; {heading(run)}"
    )
    yield ""
    names = [name.partition("/")[2] for name in found if name.startswith("within/")]
    body = [
        [
            number,
            f"{found['limit'] / _GB:.3f}",
            f"{found[f'within/{number}']:.2f}",
            f"{found[f'most/{number}'] / _GB:.3f}",
        ]
        for number in names
    ]
    yield from table(["device", "limit GB", "met after s", "peak afterwards GB"], body)
    yield ""
    yield (
        f"Before, requests held {found['peak'] / _GB:.3f} GB; they free memory as they finish. "
        f"{found['same']:.0f} of {found['requests']:.0f} answers were the same as without a limit."
    )


def _over(row: Result | None) -> str:
    return f"{row['value']:.3f} ± {row['half_width']:.3f}" if row else ""


def full_table(run: Result) -> Iterator[str]:
    """Yields the table for engines that run one at a time and fill the GPU."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    arms = [name.partition("/")[2] for name in found if name.startswith("rate/")]
    body = []
    for arm in arms:
        cells = [f"{found[f'rate/{arm}']['value']:,.0f}", number(found[f"step/{arm}"]["median"], 4)]
        cells += [_over(found.get(f"over/{kind}/{arm}")) for kind in ("rate", "started", "step")]
        mapped, same = found.get(f"mapped/{arm}"), found.get(f"same/{arm}")
        cells += [
            f"{found[f'waited/{arm}']['value']:.0%}",
            f"{mapped['value'] / _GB:.1f}" if mapped else "",
            f"{same['value']:,} of {same['of']:,}" if same else "",
        ]
        body.append([arm, *cells])
    engines = len(found[f"rate/{arms[0]}"]["rounds"])
    yield (
        f"A full GPU: {run['options']['requests']} requests fill "
        f"{found['memory']['value'] / _GB:.1f} GB of keys and values; engines run one at a time, "
        f"{engines} of each kind in alternating order; ± is the 95% confidence interval; "
        f"{heading(run)}"
    )
    yield ""
    head = ["engine", "tokens/s", "decode step ms", "tokens/s relative to stock"]
    head += ["in the first load", "step speed relative to stock"]
    head += ["host waits for the GPU", "GB mapped", "answers identical to stock's"]
    yield from table(head, body)


def first_table(run: Result) -> Iterator[str]:
    """Yields the time-to-first-token table for an idle engine."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    arms = list(dict.fromkeys(name.partition("/")[2] for name in found if name[0].isdigit()))
    sizes = list(dict.fromkeys(name.partition("/")[0] for name in found if name[0].isdigit()))
    body = []
    for size in sizes:
        firsts = [number(found[f"{size}/{arm}"]["median"], 4) for arm in arms]
        body.append([f"{int(size):,}", *firsts, _over(found.get(f"over/{size}/{arms[-1]}"))])
    each = found[f"{sizes[0]}/{arms[0]}"]["n"]
    yield (
        f"Time to first token of an idle engine in ms; {each} requests to each engine in "
        f"alternating order; ± is the 95% confidence interval; {heading(run)}"
    )
    yield ""
    yield from table(["prompt tokens", *arms, f"{arms[-1]} relative to {arms[0]}"], body)


def cost_table(run: Result) -> Iterator[str]:
    """Yields the table of host time spent in the pool's code per decode step."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    body = [
        [name.partition("/")[0], *(number(row[one], 3) for one in ("median", "mean", "p99"))]
        for name, row in found.items()
    ]
    yield f"Host time in the pool's code per decode step, us; {heading(run)}"
    yield ""
    yield from table(["requests", "median", "mean", "p99"], body)


def offload_table(run: Result) -> Iterator[str]:
    """Yields the tables for prompts that are loaded from host memory."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    keys = [name.split("/") for name in found]
    sizes = list(dict.fromkeys(key[1] for key in keys if key[0] == "computed"))
    arms = list(dict.fromkeys(key[2] for key in keys if key[0] == "computed"))
    ways = [(how, arm) for how in ("computed", "loaded") for arm in arms]
    firsts = [
        [
            f"{int(size):,}",
            *(number(found[f"{how}/{size}/{arm}"]["median"], 4) for how, arm in ways),
            _over(found.get(f"over/loaded/{size}/{arms[-1]}")),
        ]
        for size in sizes
    ]
    each = found[f"loaded/{sizes[0]}/{arms[0]}"]["n"]
    alike = found["alike"]
    yield (
        "Time to first token (ms) of prompts that are computed and, after an idle period, loaded "
        f"from host memory; {each} prompts per length and engine, in alternating order; ± is the "
        f"95% confidence interval; for {alike['value']} of {alike['of']} prompts all engines gave "
        f"the same answer, whether computed or loaded; {heading(run)}"
    )
    yield ""
    head = [f"{how}, {arm}" for how, arm in ways]
    head.append(f"loaded, {arms[-1]} relative to {arms[0]}")
    yield from table(["prompt tokens", *head], firsts)
    yield ""
    hows = ("none", "loaded", "computed")
    body = [
        [arm]
        + [number(found[f"rate/{how}/{arm}"]["value"], 3) for how in ("stored", "loaded")]
        + [number(found[f"gap/{how}/{arm}"]["value"], 3) for how in hows]
        for arm in arms
    ]
    gaps = ["inter-token p99 ms", "while prompts are loaded", "while prompts are computed"]
    yield from table(["engine", "stores GB/s", "loads GB/s", *gaps], body)


def prefixes_table(run: Result) -> Iterator[str]:
    """Yields the table for two engines that take turns and whose prefixes do not fit in memory."""
    found = {name.partition("/")[2]: row for name, row in rows(run).items()}
    arms = [name.partition("/")[2] for name in found if name.startswith("hits/")]
    body = []
    for arm in arms:
        first, same = found[f"first/{arm}"], found[f"same/{arm}"]
        body.append(
            [
                arm.replace("+host", ", offloading"),
                f"{found[f'hits/{arm}']['value']:.1f}",
                *(number(first[one]) for one in ("median", "p90", "p99")),
                f"{same['value']} of {same['of']}",
            ]
        )
    capacity = found["capacity"]["value"] / _GB
    yield (
        f"Two engines take turns, each with prompts that need all {capacity:.1f} GB of keys and "
        f"values; {heading(run)}"
    )
    yield ""
    head = ["engines", "prompt tokens found, %", "time to first token p50 ms", "p90", "p99"]
    yield from table([*head, "answers identical to the first arm's"], body)
    yield ""
    yield f"![Memory over time, and time to first token]({picture_of(run)})"


def part_vllm(_: list[Result]) -> list[str]:
    """Returns the tables for the committed vLLM runs."""
    shown = {
        "load": load_table,
        "idle": idle_table,
        "share": share_table,
        "sleep": sleep_table,
        "blocks": blocks_table,
        "rough": rough_table,
        "limit": limit_table,
        "full": full_table,
        "first": first_table,
        "cost": cost_table,
        "offload": offload_table,
        "prefixes": prefixes_table,
    }
    lines: list[str] = []
    for run in runs("vllm"):
        for part in run["parts"]:
            if part in shown:
                lines += [*shown[part](run), ""]
    return lines[:-1]


def part_sglang(_: list[Result]) -> list[str]:
    """Returns the tables for the committed SGLang runs."""
    lines: list[str] = []
    for run in runs("sglang"):
        found = {name.partition("/")[2]: row for name, row in rows(run).items()}
        if "share" in run["parts"]:
            text, lined = shared_words(run["options"], found), sglang.shared(found)
            head = sglang.SHARED
        else:
            text, lined, head = turns_words(run["options"]), sglang.body(found), sglang.HEAD
        text += f", {title(run)}, commit {run['machine']['commit'][:7]}:"
        lines += [text, "", *table(head, lined), ""]
        skipped = [f"{one['id'].partition('/')[2]} ({one['why']})" for one in missing(run)]
        if skipped:
            lines += [f"Not run: {', '.join(skipped)}.", ""]
    return lines[:-1]


def turns_words(options: Result) -> str:
    """Describes the setup of a comparison with stock SGLang."""
    tier = ", hierarchical cache" if options["engine"].get("enable_hierarchical_cache") else ""
    return (
        f"SGLang {options['sglang']}, shape {options['shape']}, prompts of "
        f"{options['prompt']:,} tokens, answers of {options['answer']} tokens, `--page-size "
        f"{options['page_size']}`, {options['engine']['attention_backend']} attention{tier}"
    )


def shared_words(options: Result, found: Result) -> str:
    """Describes the setup of a run with vLLM and SGLang on one GPU."""
    prefixes = "" if options["prefixes"] else ", without prefix caches"
    return (
        f"vLLM {options['vllm']} and SGLang {options['sglang']} on one GPU, shape "
        f"{options['shape']}, {found['capacity']['value'] / _GB:.1f} GB of keys and values for both"
        f"{prefixes}, bursts that need {options['burst']:g} of it every {options['period']:g} s, "
        f"rounds of {options['bursts']} bursts"
    )


def missing(run: Result) -> list[Result]:
    """Returns the measurements missing from a run, with the reasons."""
    return [one for part in run["parts"].values() for one in part["missing"]]


PARTS = {"serving": part_serving, "vllm": part_vllm, "sglang": part_sglang}
