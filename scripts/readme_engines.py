# SPDX-License-Identifier: MIT
"""The tables of whole engines: the serving loop's arms, and vLLM on the pool beside stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from readme_cache import runs
from readme_format import Result, number, rows, table, title

# As benchmarks/serve/README.md names the arms.
ARMS = (
    *("contiguous", "again", "fa3", "grouped", "2M", "paged16", "paged128", "static"),
    *("fa2", "flashinfer", "flashinfer16"),
)
ENGINES = ("stock", "elastic", "stock again")
_GB = 1e9


def arrivals(options: Result) -> str:
    """How the requests of a serving run arrive."""
    if options["workload"] == "offline":
        return "all there at the start"
    if options["workload"] == "azure":
        times = options["speed_up"]
        return "by the trace's times" + (f", {times:g} times as fast" if times != 1 else "")
    return f"{options['rate']:g} a second"


def serving_row(found: dict[str, Result], part: str, arm: str) -> list[str]:
    """What one arm did."""
    cell = {key: found[f"{part}/{key}/{arm}"]["value"] for key in ("tokens", "batch", "host")}
    times = [found[f"{part}/{key}/{arm}"]["value"] for key in ("first50", "first99", "between99")]
    held, used = (found[f"{part}/{key}/{arm}"]["value"] / _GB for key in ("held", "used"))
    return [
        f"`{arm}`",
        f"{cell['tokens']:,.0f}",
        f"{cell['batch']:.1f}",
        *(f"{value:,.0f}" for value in times),
        f"{held:.1f}",
        f"{used:.1f}",
        f"{cell['host']:,.0f}",
    ]


def part_serving(_: list[Result]) -> list[str]:
    """Each kept run of the serving loop, an arm a row."""
    lines: list[str] = []
    for run in runs("serve"):
        found, options = rows(run), run["options"]
        head = ["", "tokens/s", "batch", "first token p50 ms", "p99", "between tokens p99 ms"]
        for part in run["parts"]:
            arms = [arm for arm in ARMS if f"{part}/tokens/{arm}" in found]
            lines += [
                f"{options['served']} requests ({options['trace'] or 'made up'}), "
                f"{arrivals(options)}; {options['model']}'s shape, "
                f"{options['kv_bytes'] / 2**30:.0f} GiB for keys and values, {title(run)}:",
                "",
                *table(
                    [*head, "GB held by requests", "GB of rows", "host us a step"],
                    [serving_row(found, part, arm) for arm in arms],
                ),
                "",
            ]
            missed = [aim for aim in run["aims"] if aim["pass"] is False]
            if missed:
                words = (f"{aim['what'].partition(': ')[2]} {aim['value']:.3f}" for aim in missed)
                lines += [f"Aims **missed** by `{arms[0]}`: {'; '.join(words)}.", ""]
    return lines[:-1]


def load_table(run: Result) -> Iterator[str]:
    """Throughput and latency by rate."""
    found, options = rows(run), run["options"]
    body = []
    for rate in options["rates"]:
        name = f"{rate:g}"
        if f"load/rate/{name}/stock" not in found:
            continue
        base = found[f"load/rate/{name}/stock"]["value"]
        for engine in ENGINES:
            speed = found[f"load/rate/{name}/{engine}"]["value"]
            first, gap = (found[f"load/{kind}/{name}/{engine}"] for kind in ("first", "gap"))
            same = found[f"load/same/{name}/{engine}"]
            body.append(
                [
                    f"{name} a second" if rate else "all at once",
                    engine,
                    f"{speed:,.0f}",
                    f"{speed / base:.3f}",
                    *(number(one[key]) for one in (first, gap) for key in ("median", "p99")),
                    f"{same['value']} of {same['of']}",
                ]
            )
    head = ["requests", "engine", "tokens/s", "over stock", "first token p50 ms", "p99"]
    yield (
        f"vLLM {options['vllm']}, {options['shape']}'s shape, blocks of {options['block_size']} "
        f"tokens on pages of {options['page'] >> 10} KB, {title(run)}:"
    )
    yield ""
    yield from table([*head, "between tokens p50 ms", "p99", "answers as stock's"], body)
    yield ""
    peak, rest, after = (
        found[f"load/{key}"]["value"] for key in ("peak", "rest/mapped", "rest/seconds")
    )
    yield (
        f"The elastic engine had up to {peak / _GB:.1f} GB mapped; {after:.1f} s after its last "
        f"request {rest / 2**20:.0f} MiB."
    )


def sleep_table(run: Result) -> Iterator[str]:
    """What sleeping and waking take."""
    found, options = rows(run), run["options"]
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
    head = ["engine", "longest `sleep(1)` s", "shortest s", "`wake_up()` s", "then first token ms"]
    yield (
        f"vLLM {options['vllm']}, {options['shape']}'s shape, {title(run)}, "
        f"commit {run['machine']['commit'][:7]}:"
    )
    yield ""
    yield from table([*head, "GB given back", "answers as before"], body)


def part_vllm(_: list[Result]) -> list[str]:
    """Each kept run of vLLM."""
    shown = {"load": load_table, "sleep": sleep_table}
    lines: list[str] = []
    for run in runs("vllm"):
        for part in run["parts"]:
            if part in shown:
                lines += [*shown[part](run), ""]
    return lines[:-1]


PARTS = {"serving": part_serving, "vllm": part_vllm}
