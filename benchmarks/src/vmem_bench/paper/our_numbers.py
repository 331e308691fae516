# SPDX-License-Identifier: MIT
"""Our number for each table and figure in the papers, as text.

The numbers are computed from committed results, or by arithmetic over a model's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyvmem.layouts.options import size
from pyvmem.layouts.shapes import SHAPES
from vmem_bench.paged_kernels import CASES
from vmem_bench.paper.results import NotMeasured, Results
from vmem_bench.serving.results import over

__all__ = [
    "DECODING",
    "MODELS",
    "addresses",
    "bandwidth",
    "block_sizes",
    "block_tokens",
    "blocks",
    "by_slots",
    "calls",
    "deferred",
    "fa3_over_fa2",
    "forks",
    "freed",
    "hits",
    "kv_bytes",
    "largest",
    "long_batches",
    "opt",
    "over_blocks",
    "overlap",
    "page_size",
    "prefix",
    "rate",
    "reading",
    "roofline",
    "served",
    "shared",
    "slot_tokens",
    "small_pages",
    "static",
    "swapping",
    "used",
    "waste",
    "waste_by_page",
]

# ---- arithmetic ----------------------------------------------------------------------------------

MODELS = ("Yi-6B", "Llama-3-8B", "Yi-34B")
_PAGES = ("64K", "128K", "256K", "2M")


def block_tokens(model: str, ranks: int, page: int) -> int:
    """Returns the number of tokens whose keys (or values) in one layer fit in a page."""
    shape = SHAPES[model].on_ranks(ranks)
    return page // (shape.num_kv_heads * shape.head_dim * shape.config().itemsize)


def waste(model: str, page: int) -> float:
    """Returns the most memory that a request can waste, in MB: one page per tensor, on one rank."""
    return 2 * SHAPES[model].num_layers * page / 2**20


def slot_tokens(memory: float, layers: int, hidden: int) -> float:
    """Returns how many tokens of a float16 cache fit in `memory` bytes, without grouped KV heads.

    hidden: the hidden size, which is also the size of a token's keys (or values) in one layer.
    """
    return memory / (2 * layers * hidden * 2)


def kv_bytes(_: Results) -> str:
    """The size of a token's keys and values in each model."""
    return " / ".join(f"{SHAPES[name].token_bytes >> 10}" for name in MODELS) + " KB"


def blocks(_: Results) -> str:
    """The range of token counts per 64 KB page, over all models on one and two ranks."""
    found = [block_tokens(model, ranks, size("64K")) for model in MODELS for ranks in (1, 2)]
    return f"{min(found)} to {max(found)} tokens in a page of 64 KB"


def waste_by_page(_: Results) -> str:
    """The largest amount of memory that a request can waste, by page size."""
    llama = " / ".join(f"{waste('Llama-3-8B', size(page)):g}" for page in _PAGES)
    yi = " / ".join(f"{2 * waste('Yi-34B', size(page)):g}" for page in _PAGES)
    return f"Llama-3-8B {llama} MB; Yi-34B on 2 GPUs {yi} MB"


def addresses(_: Results) -> str:
    """The virtual memory that Yi-34B's cache reserves on each of two GPUs."""
    shape = SHAPES["Yi-34B"].on_ranks(2)
    buffer = 500 * 200_000 * shape.num_kv_heads * shape.head_dim * 2
    return f"{2 * shape.num_layers * buffer / 1e12:.1f} TB per GPU"


def opt(_: Results) -> str:
    """The size of a token in OPT-13B's cache, and the number of tokens that fit in 12 GB."""
    each = 2 * 40 * 5120 * 2 / 1024
    return (
        f"{each:.0f} KB per token, {slot_tokens(12 * 2**30, 40, 5120) / 1e3:.1f}K tokens in 12 GB"
    )


# ---- kernels -------------------------------------------------------------------------------------


def over_blocks(file: str, kernel: str, *cases: str) -> Callable[[Results], str]:
    """The time with 16-token blocks and with the best block size, relative to contiguous pages."""

    def text(results: Results) -> str:
        parts = []
        for case in cases:
            small, best = (results[file].aim(f"{kernel}_{case}_{b}") for b in ("16", "best"))
            parts.append(f"{case.replace('_', ' ')}: {small:.2f}x, best block {best:.2f}x")
        return "; ".join(parts)

    return text


def block_sizes(results: Results) -> str:
    """The decode time by block size, relative to the best block size."""
    prefix = "fa3/decode_b16_16k/paged"
    times = {
        block: results["kernels-h200"].median([f"{prefix}{block}/malloc{i}" for i in (0, 1)])
        for block in (16, 64, 128, 256)
    }
    best = min(times.values())
    return ", ".join(f"{block}: {time / best:.3f}x" for block, time in times.items())


_BATCHES = ("decode_b16_16k", "decode_b32_16k", "decode_b128_4k")
DECODING = {case.name: case for case in CASES if case.name in _BATCHES}


def reading(results: Results, case: str, form: str) -> float:
    """Returns the rate in GB/s at which a form of the kernel reads keys and values in a case.

    case: a key of `DECODING`.
    """
    names = [f"fa3/{case}/{form}/malloc{i}" for i in (0, 1)]
    if form == "contiguous":
        names = [f"fa3/{case}/{form}/random{i}" for i in (0, 1)]
    return DECODING[case].nbytes / results["kernels-h200"].median(names) / 1e6


def roofline(results: Results) -> str:
    """Memory bandwidth achieved while decoding, with contiguous pages and with 16-token blocks."""
    parts = []
    for case, one in DECODING.items():
        mine, paged = (reading(results, case, form) / 1e3 for form in ("contiguous", "paged16"))
        what = one.what.removeprefix("decode, ")
        parts.append(f"{what}: {mine:.2f} TB/s, blocks of 16 {paged:.2f}")
    return "; ".join(parts)


def fa3_over_fa2(results: Results) -> str:
    """FlashAttention-2's time divided by FlashAttention-3's, for prefill and decode."""

    def over(case: str) -> float:
        two, three = (results["h100"].value(f"attention/{k}/{case}/random0") for k in _VERSIONS)
        return two / three

    prefill, decode = over("prefill_32k"), over("decode_b32_32k")
    return f"kernels alone, prefill of 32K {prefill:.2f}x, decode of 32 x 32K {decode:.2f}x"


_VERSIONS = ("sdpa", "fa3")  # torch's flash kernel is FlashAttention-2


def page_size(results: Results) -> str:
    """The attention time with 64 KB pages, relative to cudaMalloc memory."""
    names = ("decode_b64_8k", "decode_b32_32k", "prefill_32k")
    found = [results["h100"].aim(f"fa3_{name}_random") for name in names]
    return f"time with 64 KB pages relative to cudaMalloc {min(found):.3f}x to {max(found):.3f}x"


def by_slots(results: Results) -> str:
    """The time of FlashInfer's best paged form, relative to its calls over slots."""
    one = results["kernels-flashinfer-long-h100"]
    parts: list[str] = []
    for tokens in ("128k", "192k"):
        name = f"flashinfer_prefill_{tokens}"
        slots, layered = (one.aim(f"{name}_{how}") for how in ("slots", "layered"))
        parts.append(
            f"prefill {tokens}: {slots:.2f}x, with all layers in one tensor {layered:.2f}x"
        )
    return "time of the best block size relative to slots: " + "; ".join(parts)


# ---- memory calls --------------------------------------------------------------------------------


def calls(results: Results) -> str:
    """The latency of our memory calls by page size, and of CUDA's calls at 2 MB."""
    one = results["h100"]
    maps = " / ".join(f"{one.value(f'calls/map_access/stock/{page}'):.0f}" for page in _PAGES)
    names = ("create", "map", "set_access", "unmap", "release")
    cuda = " / ".join(f"{one.value(f'calls/{name}/cumem/2M'):.0f}" for name in names)
    return f"map with access {maps} µs (64 KB to 2 MB); CUDA at 2 MB: {cuda} µs"


def bandwidth(results: Results) -> str:
    """The allocation bandwidth by page size, mapping page by page and in runs."""
    one = results["h100"]
    single, batch = (
        " / ".join(
            f"{one.value(f'bandwidth/{how}/stock/{page}', 'gb_per_s'):.1f}" for page in _PAGES
        )
        for how in ("single", "batch")
    )
    return f"page by page {single} GB/s, in runs {batch} GB/s"


def rate(results: Results) -> str:
    """The amount of memory that decoding allocates per second."""
    one = results["overlap-h200"]
    seconds = one.value("iterations/time/async", "mean") * one.value("iterations/time/async", "n")
    pages = one.value("iterations/grown_pages/async") + one.value("iterations/reused_pages/async")
    rate = pages * size("64K") / (seconds / 1e3) / 1e6
    batch = one.data["options"]["batch"]
    return f"{rate:.0f} MB/s needed at a batch of {batch} (4K to 8K tokens, requests replaced)"


# ---- the cache -----------------------------------------------------------------------------------


def overlap(results: Results, file: str = "overlap-h200") -> str:
    """How mapping in the background and on the critical path change an iteration's p99."""
    one = results[file]
    counts = [f"{one.value(f'iterations/spikes/{mode}'):.0f}" for mode in ("async", "sync")]
    return (
        f"p99 of an iteration {one.aim('p99_async'):.3f}x in the background, "
        f"{one.aim('p99_sync'):.2f}x on the critical path; spikes: {' and '.join(counts)}"
    )


def deferred(results: Results, file: str = "deferred-h200") -> str:
    """How much longer a prefill takes with reused pages and with pages that are mapped first."""
    one = results[file]
    reuse, runs, pages = (one.aim(f"prefill_{mode}") for mode in ("reuse", "sync", "pages"))
    return f"reused {reuse:.3f}x; mapped first in runs {runs:.2f}x, in single pages {pages:.2f}x"


def largest(results: Results, file: str = "capacity", models: Sequence[str] = MODELS) -> str:
    """The mean batch size with 64 KB pages and with 2 MB pages, by model."""
    parts = []
    for model in models:
        rows = [f"azure_2023_conv/{model}/g1/{page}" for page in ("64K", "2M")]
        small, large = map(results[file].value, rows)
        parts.append(f"{model} {small:.0f} / {large:.0f} ({small / large:.2f}x)")
    return "mean batch on Azure's trace, " + ", ".join(parts)


def used(results: Results) -> str:
    """The fraction of mapped memory that rows use, by page size."""
    parts = []
    for name, words in (
        ("g1/64K", "64 KB pages"),
        ("g1/2M", "2 MB"),
        ("blocks/16", "blocks of 16"),
    ):
        row = results["capacity"].row(f"azure_2023_conv/Llama-3-8B/{name}")
        wasted = row["wasted_bytes"] * row["value"]
        parts.append(f"{words} {100 * (1 - wasted / row['mapped_bytes']):.1f}%")
    return "share of held memory that rows use, Azure's trace: " + ", ".join(parts)


def long_batches(results: Results) -> str:
    """The mean batch size on the arXiv trace, by model and page size."""
    parts = []
    for model in ("Yi-6B", "Llama-3-8B", "Yi-34B"):
        batches = [
            results["capacity"].value(f"vattention_arxiv_long_offline/{model}/{name}")
            for name in ("g1/64K", "g1/2M", "blocks/16")
        ]
        parts.append(f"{model} " + " / ".join(f"{batch:.1f}" for batch in batches))
    return "64 KB / 2 MB / blocks of 16: " + ", ".join(parts) + " (Yi-34B: one rank of two)"


def prefix(results: Results) -> str:
    """The time to map a recorded prefix."""
    one = results["prefix-map-h200"]
    runs, large, pages = (one.aim(f"prefix_{how}") for how in ("runs", "runs_2m", "fragmented"))
    return (
        f"a prefix of 10,240 tokens mapped in {runs:.1f} ms (runs), {large:.1f} ms (2 MB pages), "
        f"{pages:.0f} ms (single pages)"
    )


def hits(results: Results) -> str:
    """The fraction of prompt tokens that the prefix cache finds."""
    one = results["prefixes"]
    bound, found = one.value("hits/bound"), one.value("hits/tree/g1/64K/200G")
    return f"{found:.1f}% of prompt tokens found with 200 GB, {bound:.1f}% without a limit"


# ---- serving -------------------------------------------------------------------------------------


def served(file: str, part: str, figure: str, words: str, *others: str) -> Callable[[Results], str]:
    """The first arm's figure, relative to the other arms and to its own second run."""

    def text(results: Results) -> str:
        one = results[file]
        first = one.data["options"]["arms"][0]
        ours = one.row(f"{part}/{figure}/{first}")
        ratios = []
        for name in (*others, "again"):
            try:
                ratios.append(f"{name} {over(ours, one.row(f'{part}/{figure}/{name}')):.3f}x")
            except NotMeasured:
                continue
        if not ratios:
            raise NotMeasured(f"{file}: {figure} of another arm")
        return f"{words} of {first} relative to " + ", ".join(ratios)

    return text


def static(results: Results) -> str:
    """The batch size, throughput and memory use, compared with static slots."""
    one, part = results["serve-azure-h200"], "offline"
    first = one.data["options"]["arms"][0]
    batches = [one.value(f"{part}/batch/{name}") for name in (first, "static")]
    speed = one.value(f"{part}/tokens/{first}") / one.value(f"{part}/tokens/static")
    held = one.value(f"{part}/used/static") / one.value(f"{part}/held/static")
    mine = one.value(f"{part}/used/{first}") / one.value(f"{part}/held/{first}")
    return (
        f"batch {batches[0]:.0f}, static {batches[1]:.0f}; tokens/s {speed:.1f}x; share of held "
        f"memory that rows use {100 * mine:.0f}%, static {100 * held:.0f}%"
    )


def freed(results: Results, file: str = "serve-azure-online-h200") -> str:
    """The mean fraction of the pool that stays unmapped."""
    one, part = results[file], "azure"
    mapped, pool = (one.value(f"{part}/mapped/{name}") for name in ("contiguous", "paged16"))
    return f"{100 * (1 - mapped / pool):.0f}% of the pool is not mapped, on average"


def shared(results: Results) -> str:
    """The number of prefix tokens found, and the throughput relative to 16-token blocks."""
    one, part = results["serve-prefixes-h200"], "prefixes"
    found = [f"{one.value(f'{part}/shared/{name}'):,.0f}" for name in ("contiguous", "paged16")]
    speed = one.value(f"{part}/tokens/contiguous") / one.value(f"{part}/tokens/paged16")
    return f"tokens found {found[0]}, with blocks of 16 {found[1]}; tokens/s {speed:.3f}x"


_BATCH_FIGURES = {
    "batch": "batch",
    "full": "batch while others wait",
    "largest": "largest batch",
    "tokens": "tokens/s",
}


def small_pages(results: Results, file: str = "serve-azure-h200", part: str = "offline") -> str:
    """The batch size and throughput with 64 KB pages, relative to 2 MB pages."""
    one = results[file]
    first = one.data["options"]["arms"][0]
    parts = []
    for key, words in _BATCH_FIGURES.items():
        try:
            rows = [one.row(f"{part}/{key}/{arm}") for arm in (first, "2M")]
        except NotMeasured:
            if key != "full":  # absent if arrivals are so slow that no request waits
                raise
            continue
        parts.append(f"{words} {over(*rows):.2f}x")
    return f"64 KB relative to 2 MB in {one.data['options']['kv_bytes'] >> 30} GB: " + ", ".join(
        parts
    )


def forks(results: Results) -> str:
    """The memory that sharing saves, as ranges over widths 2, 4 and 6, as in the paper."""
    one, parts = results["sharing"], []
    for load, name in (("alpaca", "Alpaca"), ("sharegpt", "ShareGPT")):
        for system, words in (
            ("g1/64K", "64 KB pages"),
            ("g1/2M", "2 MB"),
            ("blocks/16", "blocks"),
        ):
            texts = []
            for way in ("sampling", "beams"):
                found = [one.value(f"{way}/{load}/OPT-13B/{width}/{system}") for width in (2, 4, 6)]
                texts.append(f"{min(found):.1f} to {max(found):.1f}%")
            parts.append(f"{name}, {words} {', '.join(texts)}")
    return "; ".join(parts)


def swapping(results: Results) -> str:
    """The time to swap a request out and back in, relative to recomputation, by length."""
    one, parts = results["swap-h200"], []
    for tokens in (512, 2048, 8192):
        pages = one.aim(f"{tokens}_pages")
        blocks = [f"{one.aim(f'{tokens}_blocks_{block}'):.2f}" for block in (16, 64)]
        parts.append(
            f"{tokens:,} tokens: pages {pages:.2f}x, blocks of 16 / 64 {' / '.join(blocks)}x"
        )
    return "time to swap out and in relative to recomputation, " + "; ".join(parts)
