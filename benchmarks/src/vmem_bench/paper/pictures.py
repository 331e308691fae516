# SPDX-License-Identifier: MIT
"""The papers' figures, redrawn with matplotlib from our committed results.

Every file contains a digest of the data that it shows, so that a changed result is detected without
comparing drawings, which differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from vmem_bench.paper.our_numbers import DECODING, reading
from vmem_bench.paper.results import NotMeasured, Results
from vmem_bench.serving.results import over

__all__ = ["PICTURES", "Picture", "available", "digest", "draw"]

_PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_GB = 1 << 30


@dataclass(frozen=True)
class Picture:
    """A figure on our page.

    Attributes:
        name: name of the file, without its extension.
        title: what the picture shows and which figure of a paper it follows.
        kind: "bars" or "lines".
        label: label of the vertical axis.
        along: label of the horizontal axis.
        data: returns, for bars, the groups' names and each series' values; for lines, each series'
            points. Raises NotMeasured if a result is missing.
    """

    name: str
    title: str
    kind: str
    label: str
    along: str
    data: Callable[[Results], dict[str, Any]]


def _paged(results: Results, cases: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns bars: the time with each block size, relative to contiguous 64 KB pages."""
    groups: list[str] = []
    series: dict[str, list[float]] = {name: [] for name in ("contiguous", "16", "128", "256")}
    for file, kernel, words in (
        ("kernels-h200", "fa3", "FA3"),
        ("kernels-flashinfer-h200", "flashinfer", "FlashInfer"),
    ):
        for case, what in cases:
            groups.append(f"{words}\n{what}")
            series["contiguous"].append(1.0)
            for block in ("16", "128", "256"):
                series[block].append(results[file].aim(f"{kernel}_{case}_{block}"))
    return {"groups": groups, "series": series}


def _prefill(results: Results) -> dict[str, Any]:
    return _paged(results, (("prefill_16k", "16K"), ("prefill_64k", "64K")))


def _decode(results: Results) -> dict[str, Any]:
    return _paged(results, (("decode_b16_16k", "16*16K"), ("decode_b32_16k", "32*16K")))


def _batch(results: Results) -> dict[str, Any]:
    models = ("Yi-6B", "Llama-3-8B", "Yi-34B")
    return {
        "groups": list(models),
        "series": {
            page: [results["capacity"].value(f"azure_2023_conv/{m}/g1/{page}") for m in models]
            for page in ("2M", "256K", "64K")
        },
    }


def _overlap(results: Results) -> dict[str, Any]:
    one = results["overlap-h200"]
    names = {"sync": "without overlapping", "async": "with overlapping"}
    return {
        "series": {words: one.row(f"iterations/time/{m}")["series"] for m, words in names.items()}
    }


def _deferred(results: Results) -> dict[str, Any]:
    one = results["deferred-h200"]
    modes = {
        "mapped": "mapped before",
        "reuse": "reused",
        "sync": "in runs",
        "pages": "page by page",
    }
    return {
        "groups": list(modes.values()),
        "series": {"prefill of 16K": [one.value(f"prefill/time/{mode}") for mode in modes]},
    }


def _memory(results: Results) -> dict[str, Any]:
    one = results["serve-azure-online-h200"]
    points = {}
    for arm, words in (("contiguous", "64 KB pages"), ("2M", "2 MB pages"), ("paged16", "blocks")):
        row = one.row(f"azure/memory/{arm}")
        seconds, mapped, used = (row["columns"].index(c) for c in ("seconds", "mapped", "used"))
        points[f"{words}: mapped"] = [[s[seconds], s[mapped] / _GB] for s in row["series"]]
        if arm == "contiguous":
            points["tokens"] = [[s[seconds], s[used] / _GB] for s in row["series"]]
    return {"series": points}


_SIZES = {"64K": "64 KB", "128K": "128 KB", "256K": "256 KB", "2M": "2 MB"}


def _calls(results: Results) -> dict[str, Any]:
    one = results["h100"]
    names = {"create": "create", "map_access": "map with access"}
    names |= {"unmap": "unmap", "release": "release"}
    systems = [f"stock/{page}" for page in _SIZES] + ["cumem/2M"]
    series = {
        words: [one.value(f"calls/{name}/{system}") for system in systems]
        for name, words in names.items()
    }
    return {"groups": [*_SIZES.values(), "CUDA, 2 MB"], "series": series}


def _bandwidth(results: Results) -> dict[str, Any]:
    one = results["h100"]
    ways = {"single": "page by page", "batch": "in runs"}
    return {
        "groups": list(_SIZES.values()),
        "series": {
            words: [one.value(f"bandwidth/{how}/stock/{page}", "gb_per_s") for page in _SIZES]
            for how, words in ways.items()
        },
    }


def _reads(results: Results) -> dict[str, Any]:
    forms = {"contiguous": "contiguous", "paged16": "16", "paged128": "128", "paged256": "256"}
    return {
        "groups": [DECODING[name].what.removeprefix("decode, ") for name in DECODING],
        "series": {
            words: [reading(results, name, form) for name in DECODING]
            for form, words in forms.items()
        },
    }


def _pages(results: Results) -> dict[str, Any]:
    cases = {"decode_b64_8k": "64*8K", "decode_b32_32k": "32*32K", "prefill_32k": "prefill 32K"}
    found = [results["h100"].aim(f"fa3_{name}_random") for name in cases]
    return {
        "groups": list(cases.values()),
        "series": {"cudaMalloc": [1.0] * len(cases), "64 KB": found},
    }


def _largest(results: Results) -> dict[str, Any]:
    groups: list[str] = []
    series: dict[str, list[float]] = {page: [] for page in ("2M", "256K", "64K")}
    for file, memory, models in (
        ("capacity", "80 GB", ("Yi-6B", "Llama-3-8B", "Yi-34B")),
        ("capacity-40g", "40 GB", ("Yi-6B", "Llama-3-8B")),
    ):
        for model in models:
            groups.append(f"{model}\n{memory}")
            for page, values in series.items():
                name = f"azure_2023_conv/{model}/g1/{page}"
                values.append(results[file].value(name, "max_batch"))
    return {"groups": groups, "series": series}


def _held(results: Results) -> dict[str, Any]:
    layouts = {
        "g1/2M": "2 MB pages",
        "g1/256K": "256 KB",
        "g1/64K": "64 KB",
        "blocks/256": "blocks of 256",
        "blocks/16": "blocks of 16",
    }
    rows, wasted = [], []
    for name in layouts:
        row = results["capacity"].row(f"azure_2023_conv/Llama-3-8B/{name}")
        part = 100 * row["wasted_bytes"] * row["value"] / row["mapped_bytes"]
        rows.append(100 - part)
        wasted.append(part)
    return {"groups": list(layouts.values()), "series": {"rows": rows, "no rows": wasted}}


def _hits(results: Results) -> dict[str, Any]:
    one = results["prefixes"]
    layouts = {
        "tree/g1/64K": "64 KB pages",
        "tree/g8/64K": "64 KB, 8 layers a tensor",
        "tree/g1/2M": "2 MB pages",
        "blocks/16": "blocks of 16",
    }
    sizes = (10, 20, 50, 100, 200)
    series = {
        words: [[n, one.value(f"hits/{name}/{n}G")] for n in sizes]
        for name, words in layouts.items()
    }
    bound = one.value("hits/bound")
    series["without a limit"] = [[n, bound] for n in sizes]
    return {"series": series}


def _served(file: str, part: str, figures: dict[str, str]) -> Callable[[Results], dict[str, Any]]:
    """Returns a function for `Picture.data`: the arms' figures, relative to ``contiguous``."""

    def data(results: Results) -> dict[str, Any]:
        one = results[file]
        arms = {"contiguous": "64 KB", "2M": "2 MB", "paged16": "16", "paged128": "128"}
        mine = [one.row(f"{part}/{figure}/contiguous") for figure in figures]
        series: dict[str, list[float]] = {}
        for arm, words in arms.items():
            try:
                theirs = [one.row(f"{part}/{figure}/{arm}") for figure in figures]
            except NotMeasured:
                continue
            series[words] = list(map(over, theirs, mine))
        return {"groups": list(figures.values()), "series": series}

    return data


def _sharing(results: Results) -> dict[str, Any]:
    one, widths = results["sharing"], (2, 4, 6)
    ways = {"sampling": "samples", "beams": "beams"}
    systems = {"g1/2M": "2 MB pages", "g1/64K": "64 KB pages", "blocks/16": "blocks of 16"}
    return {
        "groups": [f"{width}\n{words}" for words in ways.values() for width in widths],
        "series": {
            words: [
                one.value(f"{way}/sharegpt/OPT-13B/{width}/{system}")
                for way in ways
                for width in widths
            ]
            for system, words in systems.items()
        },
    }


def _heads(results: Results) -> dict[str, Any]:
    one = results["kernels-heads-h100"]
    names = {"mha": "32 of 32", "llama": "8 of 32", "yi_6b": "4 of 32", "mqa": "1 of 32"}
    series: dict[str, list[float]] = {"contiguous": [1.0] * 2 * len(names)}
    for block in ("16", "128"):
        series[block] = [
            one.aim(f"fa3_{phase}_{name}_{block}")
            for phase in ("decode", "prefill")
            for name in names
        ]
    groups = [f"{phase}\n{words}" for phase in ("decode", "prefill") for words in names.values()]
    return {"groups": groups, "series": series}


PICTURES = (
    Picture(
        "calls",
        "Latency of the memory calls by page size (vAttention, tables 2 and 3)",
        "bars",
        "µs",
        "page size",
        _calls,
    ),
    Picture(
        "bandwidth",
        "Allocation bandwidth by page size (vAttention, table 9)",
        "bars",
        "GB/s",
        "page size",
        _bandwidth,
    ),
    Picture(
        "pages",
        "FlashAttention-3 by page size (vAttention, figure 14)",
        "bars",
        "normalized runtime",
        "batch size * context length",
        _pages,
    ),
    Picture(
        "reads",
        "Rate at which decoding reads keys and values, FlashAttention-3",
        "bars",
        "GB/s",
        "requests and context length",
        _reads,
    ),
    Picture(
        "largest",
        "Largest batch by page size, Azure's trace, replayed (vAttention, figure 15)",
        "bars",
        "largest batch",
        "model and GPU memory",
        _largest,
    ),
    Picture(
        "held",
        "Held memory with and without rows, Llama-3-8B, replayed (PagedAttention, figure 2)",
        "bars",
        "% of held memory",
        "layout",
        _held,
    ),
    Picture(
        "hits",
        "Prompt tokens found in the cache, Mooncake's conversations, replayed (vTensor)",
        "lines",
        "% of prompt tokens",
        "GB for keys and values",
        _hits,
    ),
    Picture(
        "sharing",
        "Memory saved by sharing, ShareGPT's means, OPT-13B (PagedAttention, figures 14, 15)",
        "bars",
        "% of the memory without sharing",
        "of a prompt",
        _sharing,
    ),
    Picture(
        "heads",
        "Kernels by number of KV heads, 32 query heads (vTensor)",
        "bars",
        "normalized runtime",
        "phase and KV heads",
        _heads,
    ),
    Picture(
        "makespan",
        "Offline, arXiv's trace (vAttention, figure 9)",
        "bars",
        "over 64 KB pages",
        "",
        _served("serve-arxiv-h200", "offline", {"makespan": "makespan", "tokens": "tokens/s"}),
    ),
    Picture(
        "latency",
        "Online, Azure's trace (vAttention, figure 10)",
        "bars",
        "over 64 KB pages",
        "",
        _served(
            "serve-azure-online-h200",
            "azure",
            {
                "first50": "first token\np50",
                "first99": "first token\np99",
                "between50": "between tokens\np50",
                "between99": "between tokens\np99",
            },
        ),
    ),
    Picture(
        "prefill",
        "Prefill kernels by block size (vAttention, figure 2)",
        "bars",
        "normalized runtime",
        "kernel and context length",
        _prefill,
    ),
    Picture(
        "decode",
        "Decode kernels by block size (vAttention, figure 3)",
        "bars",
        "normalized runtime",
        "kernel, batch size * context length",
        _decode,
    ),
    Picture(
        "overlap",
        "Decode iterations, memory mapped in the background or not (vAttention, figure 12)",
        "lines",
        "latency (ms)",
        "decode iteration",
        _overlap,
    ),
    Picture(
        "deferred",
        "Prefill with memory mapped first (vAttention, figure 13)",
        "bars",
        "latency (ms)",
        "pages",
        _deferred,
    ),
    Picture(
        "batch",
        "Batch by page size, Azure's trace, replayed (vAttention, figure 15)",
        "bars",
        "mean batch size",
        "model",
        _batch,
    ),
    Picture(
        "memory",
        "Memory over time under arrivals (vTensor)",
        "lines",
        "GiB",
        "seconds",
        _memory,
    ),
)


def available(results: Results) -> list[tuple[Picture, dict[str, Any]]]:
    """Returns the pictures whose results exist, with their data."""
    found = []
    for picture in PICTURES:
        try:
            found.append((picture, picture.data(results)))
        except NotMeasured:
            continue
    return found


def digest(picture: Picture, data: dict[str, Any]) -> str:
    """Returns a digest of everything that a picture shows."""
    shown = [picture.name, picture.title, picture.kind, picture.label, picture.along, data]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(picture: Picture, data: dict[str, Any]) -> str:
    """Returns the picture as SVG, with its digest in a comment at the end.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "vmem",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes: Any = figure.subplots()
        (_bars if picture.kind == "bars" else _lines)(axes, data)
        axes.set_title(picture.title, fontsize=9)
        axes.set_ylabel(picture.label)
        axes.set_xlabel(picture.along)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return f"{out.getvalue().rstrip()}\n<!-- {digest(picture, data)} -->\n"


def _bars(axes: Any, data: dict[str, Any]) -> None:
    series, groups = data["series"], data["groups"]
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(groups))]
        axes.bar(places, values, width, label=name, color=_PALETTE[number])
    axes.set_xticks(range(len(groups)), groups)


def _lines(axes: Any, data: dict[str, Any]) -> None:
    for number, (name, points) in enumerate(data["series"].items()):
        at, values = zip(*points, strict=True)
        axes.plot(at, values, label=name, color=_PALETTE[number], linewidth=1)
