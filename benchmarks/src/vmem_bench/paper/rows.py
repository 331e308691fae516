# SPDX-License-Identifier: MIT
"""One row for each table and figure of the papers: their number, and how ours is computed.

The papers' numbers are from their abstracts and from public texts that quote them (`SOURCES`);
numbers shown only by a curve are left out. Ours are computed from committed results, or marked as
not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyvmem.layouts.options import size
from pyvmem.layouts.shapes import SHAPES
from vmem_bench.paged_kernels import CASES
from vmem_bench.paper.results import NotMeasured, Results
from vmem_bench.serving.results import over

__all__ = [
    "DECODING",
    "PAPERS",
    "ROWS",
    "SOURCES",
    "Row",
    "block_tokens",
    "reading",
    "slot_tokens",
    "waste",
]

PAPERS = {
    "vAttention": "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention "
    "(ASPLOS'25, arXiv 2405.04437)",
    "vTensor": "vTensor: Flexible Virtual Tensor Management for Efficient LLM Serving "
    "(arXiv 2407.15309)",
    "PagedAttention": "Efficient Memory Management for Large Language Model Serving with "
    "PagedAttention (SOSP'23, arXiv 2309.06180)",
}
SOURCES = {
    "a": "the paper's abstract",
    "t": "the paper's text",
    "s": "public summaries of the paper's third version, which quote its text and tables",
    "v1": "a public translation of the paper's first version; some of its numbers differ",
}
_KERNELS = "vmem bench kernels --fa3 FILE"
_SERVE = "vmem bench serve"
_AZURE = f"{_SERVE} --trace AZURE --workload offline --requests 300 --limit 20G --longest 8192"
_ARXIV = (
    f"{_SERVE} --trace ARXIV --workload offline --requests 8 --limit 55G --longest 131072 --slots 8"
)
_PREFIXES = f"{_SERVE} --trace MOONCAKE --workload prefixes --requests 60 --speed-up 2 --limit 55G"
_CHAT = f"{_SERVE} --workload chat --rate 7 --requests 100 --limit 20G --longest 8192"
_ONLINE = f"{_SERVE} --trace AZURE --speed-up 4 --requests 200 --limit 55G --longest 8192"


@dataclass(frozen=True)
class Row:
    """A table or figure.

    Attributes:
        paper: one of `PAPERS`.
        number: number of the table or figure in the paper, in v3 if versions differ.
        what: what it shows.
        theirs: the paper's number, with its hardware.
        source: a key of `SOURCES`.
        file: the results file, without its extension; "": none is read.
        ours: returns the text of our number. NotMeasured: there is none.
        command: the command that measures it.
        why: why the two differ, in a sentence.
        cannot: why none of our machines can measure it; "": one can.
    """

    paper: str
    number: str
    what: str
    theirs: str
    source: str
    why: str
    file: str = ""
    ours: Callable[[Results], str] | None = None
    command: str = ""
    cannot: str = ""


# ---- arithmetic ----------------------------------------------------------------------------------

_MODELS = ("Yi-6B", "Llama-3-8B", "Yi-34B")
_PAGES = ("64K", "128K", "256K", "2M")


def block_tokens(model: str, ranks: int, page: int) -> int:
    """Tokens of one layer's keys (or values) in a page."""
    shape = SHAPES[model].on_ranks(ranks)
    return page // (shape.num_kv_heads * shape.head_dim * shape.config().itemsize)


def waste(model: str, page: int) -> float:
    """The most MB that a request wastes: a page of each tensor, all ranks counted as one."""
    return 2 * SHAPES[model].num_layers * page / 2**20


def slot_tokens(memory: float, layers: int, hidden: int) -> float:
    """Tokens whose float16 keys and values fit in `memory`, in a model without grouped heads."""
    return memory / (2 * layers * hidden * 2)


def _kv_bytes(_: Results) -> str:
    return " / ".join(f"{SHAPES[name].token_bytes >> 10}" for name in _MODELS) + " KB"


def _blocks(_: Results) -> str:
    found = [block_tokens(model, ranks, size("64K")) for model in _MODELS for ranks in (1, 2)]
    return f"{min(found)} to {max(found)} tokens in a page of 64 KB"


def _waste(_: Results) -> str:
    llama = " / ".join(f"{waste('Llama-3-8B', size(page)):g}" for page in _PAGES)
    yi = " / ".join(f"{2 * waste('Yi-34B', size(page)):g}" for page in _PAGES)
    return f"Llama-3-8B {llama} MB; Yi-34B on 2 GPUs {yi} MB"


def _addresses(_: Results) -> str:
    shape = SHAPES["Yi-34B"].on_ranks(2)
    buffer = 500 * 200_000 * shape.num_kv_heads * shape.head_dim * 2
    return f"{2 * shape.num_layers * buffer / 1e12:.1f} TB a GPU"


def _opt(_: Results) -> str:
    each = 2 * 40 * 5120 * 2 / 1024
    return f"{each:.0f} KB a token, {slot_tokens(12 * 2**30, 40, 5120) / 1e3:.1f}K tokens in 12 GB"


# ---- kernels -------------------------------------------------------------------------------------


def _over_blocks(file: str, kernel: str, *cases: str) -> Callable[[Results], str]:
    """The times of blocks of 16 and of the best blocks, divided by our contiguous pages'."""

    def text(results: Results) -> str:
        parts = []
        for case in cases:
            small, best = (results[file].aim(f"{kernel}_{case}_{b}") for b in ("16", "best"))
            parts.append(f"{case.replace('_', ' ')}: {small:.2f}x, best block {best:.2f}x")
        return "; ".join(parts)

    return text


def _block_sizes(results: Results) -> str:
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
    """GB/s: bytes of keys and values of a case of `DECODING`, divided by the time of `form`."""
    names = [f"fa3/{case}/{form}/malloc{i}" for i in (0, 1)]
    if form == "contiguous":
        names = [f"fa3/{case}/{form}/random{i}" for i in (0, 1)]
    return DECODING[case].nbytes / results["kernels-h200"].median(names) / 1e6


def _roofline(results: Results) -> str:
    parts = []
    for case, one in DECODING.items():
        mine, paged = (reading(results, case, form) / 1e3 for form in ("contiguous", "paged16"))
        what = one.what.removeprefix("decode, ")
        parts.append(f"{what}: {mine:.2f} TB/s, blocks of 16 {paged:.2f}")
    return "; ".join(parts)


def _fa3_over_fa2(results: Results) -> str:
    def over(case: str) -> float:
        two, three = (results["h100"].value(f"attention/{k}/{case}/random0") for k in _VERSIONS)
        return two / three

    prefill, decode = over("prefill_32k"), over("decode_b32_32k")
    return f"kernels alone, prefill of 32K {prefill:.2f}x, decode of 32 x 32K {decode:.2f}x"


_VERSIONS = ("sdpa", "fa3")  # torch's flash kernel is FlashAttention-2


def _page_size(results: Results) -> str:
    names = ("decode_b64_8k", "decode_b32_32k", "prefill_32k")
    found = [results["h100"].aim(f"fa3_{name}_random") for name in names]
    return f"64 KB over cudaMalloc, time: {min(found):.3f}x to {max(found):.3f}x"


def _by_slots(results: Results) -> str:
    """The best paged form's time divided by that of FlashInfer's calls for a cache's slots."""
    one = results["kernels-flashinfer-long-h100"]
    parts: list[str] = []
    for tokens in ("128k", "192k"):
        name = f"flashinfer_prefill_{tokens}"
        slots, layered = (one.aim(f"{name}_{how}") for how in ("slots", "layered"))
        parts.append(f"prefill {tokens}: {slots:.2f}x, of layers in one tensor {layered:.2f}x")
    return "best blocks over slots, time: " + "; ".join(parts)


# ---- memory calls --------------------------------------------------------------------------------


def _calls(results: Results) -> str:
    one = results["h100"]
    maps = " / ".join(f"{one.value(f'calls/map_access/stock/{page}'):.0f}" for page in _PAGES)
    names = ("create", "map", "set_access", "unmap", "release")
    cuda = " / ".join(f"{one.value(f'calls/{name}/cumem/2M'):.0f}" for name in names)
    return f"map with access {maps} µs (64 KB to 2 MB); CUDA at 2 MB: {cuda} µs"


def _bandwidth(results: Results) -> str:
    one = results["h100"]
    single, batch = (
        " / ".join(
            f"{one.value(f'bandwidth/{how}/stock/{page}', 'gb_per_s'):.1f}" for page in _PAGES
        )
        for how in ("single", "batch")
    )
    return f"page by page {single} GB/s, in runs {batch} GB/s"


def _rate(results: Results) -> str:
    one = results["overlap-h200"]
    seconds = one.value("iterations/time/async", "mean") * one.value("iterations/time/async", "n")
    pages = one.value("iterations/grown_pages/async") + one.value("iterations/reused_pages/async")
    rate = pages * size("64K") / (seconds / 1e3) / 1e6
    batch = one.data["options"]["batch"]
    return f"{rate:.0f} MB/s needed at a batch of {batch} (4K to 8K tokens, requests replaced)"


# ---- the cache -----------------------------------------------------------------------------------


def _overlap(results: Results, file: str = "overlap-h200") -> str:
    one = results[file]
    counts = [f"{one.value(f'iterations/spikes/{mode}'):.0f}" for mode in ("async", "sync")]
    return (
        f"p99 of an iteration {one.aim('p99_async'):.3f}x in the background, "
        f"{one.aim('p99_sync'):.2f}x on the critical path; spikes {' against '.join(counts)}"
    )


def _deferred(results: Results, file: str = "deferred-h200") -> str:
    one = results[file]
    reuse, runs, pages = (one.aim(f"prefill_{mode}") for mode in ("reuse", "sync", "pages"))
    return f"reused {reuse:.3f}x; mapped first in runs {runs:.2f}x, in single pages {pages:.2f}x"


def _largest(results: Results, file: str = "capacity", models: Sequence[str] = _MODELS) -> str:
    parts = []
    for model in models:
        rows = [f"azure_2023_conv/{model}/g1/{page}" for page in ("64K", "2M")]
        small, large = map(results[file].value, rows)
        parts.append(f"{model} {small:.0f} / {large:.0f} ({small / large:.2f}x)")
    return "mean batch on Azure's trace, " + ", ".join(parts)


def _used(results: Results) -> str:
    parts = []
    for name, words in (
        ("g1/64K", "64 KB pages"),
        ("g1/2M", "2 MB"),
        ("blocks/16", "blocks of 16"),
    ):
        row = results["capacity"].row(f"azure_2023_conv/Llama-3-8B/{name}")
        wasted = row["wasted_bytes"] * row["value"]
        parts.append(f"{words} {100 * (1 - wasted / row['mapped_bytes']):.1f} %")
    return "held memory that is rows, Azure's trace: " + ", ".join(parts)


def _long_batches(results: Results) -> str:
    parts = []
    for model in ("Yi-6B", "Llama-3-8B", "Yi-34B"):
        batches = [
            results["capacity"].value(f"vattention_arxiv_long_offline/{model}/{name}")
            for name in ("g1/64K", "g1/2M", "blocks/16")
        ]
        parts.append(f"{model} " + " / ".join(f"{batch:.1f}" for batch in batches))
    return "64 KB / 2 MB / blocks of 16: " + ", ".join(parts) + " (Yi-34B: one rank of two)"


def _prefix(results: Results) -> str:
    one = results["prefix-map-h200"]
    runs, large, pages = (one.aim(f"prefix_{how}") for how in ("runs", "runs_2m", "fragmented"))
    return (
        f"a prefix of 10,240 tokens mapped in {runs:.1f} ms (runs), {large:.1f} ms (2 MB pages), "
        f"{pages:.0f} ms (single pages)"
    )


def _hits(results: Results) -> str:
    one = results["prefixes"]
    bound, found = one.value("hits/bound"), one.value("hits/tree/g1/64K/200G")
    return f"{found:.1f} % of prompt tokens found with 200 GB, {bound:.1f} % without a limit"


# ---- serving -------------------------------------------------------------------------------------


def _served(
    file: str, part: str, figure: str, words: str, *others: str
) -> Callable[[Results], str]:
    """The contiguous arm's figure over that of each other arm that was run, and an equal arm's."""

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
        return f"{words}, {first} over " + ", ".join(ratios)

    return text


def _static(results: Results) -> str:
    one, part = results["serve-azure-h200"], "offline"
    first = one.data["options"]["arms"][0]
    batches = [one.value(f"{part}/batch/{name}") for name in (first, "static")]
    speed = one.value(f"{part}/tokens/{first}") / one.value(f"{part}/tokens/static")
    held = one.value(f"{part}/used/static") / one.value(f"{part}/held/static")
    mine = one.value(f"{part}/used/{first}") / one.value(f"{part}/held/{first}")
    return (
        f"batch {batches[0]:.0f} / {batches[1]:.0f} static, tokens/s {speed:.1f}x; held memory "
        f"that is rows {100 * mine:.0f} % / {100 * held:.0f} % static"
    )


def _freed(results: Results, file: str = "serve-azure-online-h200") -> str:
    one, part = results[file], "azure"
    mapped, pool = (one.value(f"{part}/mapped/{name}") for name in ("contiguous", "paged16"))
    return f"{100 * (1 - mapped / pool):.0f} % of the pool is not mapped, on average"


def _shared(results: Results) -> str:
    one, part = results["serve-prefixes-h200"], "prefixes"
    found = [f"{one.value(f'{part}/shared/{name}'):,.0f}" for name in ("contiguous", "paged16")]
    speed = one.value(f"{part}/tokens/contiguous") / one.value(f"{part}/tokens/paged16")
    return f"tokens found {found[0]}, {found[1]} in blocks of 16; tokens/s {speed:.3f}x of these"


_BATCH_FIGURES = {
    "batch": "batch",
    "full": "batch while others wait",
    "largest": "largest batch",
    "tokens": "tokens/s",
}


def _small_pages(results: Results, file: str = "serve-azure-h200", part: str = "offline") -> str:
    one = results[file]
    first = one.data["options"]["arms"][0]
    parts = []
    for key, words in _BATCH_FIGURES.items():
        try:
            rows = [one.row(f"{part}/{key}/{arm}") for arm in (first, "2M")]
        except NotMeasured:
            if key != "full":  # no request waits when arrivals are slow
                raise
            continue
        parts.append(f"{words} {over(*rows):.2f}x")
    return f"64 KB over 2 MB in {one.data['options']['kv_bytes'] >> 30} GB: " + ", ".join(parts)


def _forks(results: Results) -> str:
    """The ranges over widths 2, 4 and 6, as the paper gives them."""
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
                texts.append(f"{min(found):.1f} to {max(found):.1f} %")
            parts.append(f"{name}, {words} {', '.join(texts)}")
    return "; ".join(parts)


def _swapping(results: Results) -> str:
    one, parts = results["swap-h200"], []
    for tokens in (512, 2048, 8192):
        pages = one.aim(f"{tokens}_pages")
        blocks = [f"{one.aim(f'{tokens}_blocks_{block}'):.2f}" for block in (16, 64)]
        parts.append(
            f"{tokens:,} tokens: pages {pages:.2f}x, blocks of 16 / 64 {' / '.join(blocks)}x"
        )
    return "out and back over recomputing, " + "; ".join(parts)


_HEADS = ("decode_mha", "decode_llama", "decode_yi_6b", "decode_yi_34b", "decode_mqa")
_V, _T, _P = PAPERS
ROWS = (
    Row(
        _V,
        "Tables 2, 3",
        "latency of the memory calls",
        "map 8 / 8.5 / 9 µs at 64 / 128 / 256 KB by a changed driver; CUDA at 2 MB: create 29, "
        "map 2, set access 38, unmap 34, release 23 µs (A100)",
        "t",
        "Ours goes through the unmodified driver's external ranges, which allocate and check more "
        "in a call than theirs.",
        "h100",
        _calls,
        "vmem bench api",
    ),
    Row(
        _V,
        "Table 5",
        "models and GPUs",
        "Yi-6B on one A100, Llama-3-8B and Yi-34B on two (80 GB)",
        "v1",
        "One GPU of the next generation.",
        cannot="no A100",
    ),
    Row(
        _V,
        "§4",
        "keys and values of a token",
        "64 / 128 / 240 KB: Yi-6B / Llama-3-8B / Yi-34B",
        "s",
        "Arithmetic: equal.",
        ours=_kv_bytes,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "§5.1",
        "addresses reserved for Yi-34B on two GPUs, 500 requests of 200K",
        "12 TB a GPU",
        "s",
        "Arithmetic: equal up to rounding.",
        ours=_addresses,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Figure 2",
        "prefill kernels, paged over contiguous, time",
        "up to 1.37x (FlashAttention-2) and 1.42x (FlashInfer) (A100)",
        "s",
        "On Hopper a table costs FlashAttention-3 less, and with blocks of 128 next to nothing; "
        "FlashInfer still pays.",
        "kernels-h200",
        lambda r: (
            "FA3 "
            + _over_blocks("kernels-h200", "fa3", "prefill_16k", "prefill_64k")(r)
            + "; FlashInfer "
            + _over_blocks("kernels-flashinfer-h200", "flashinfer", "prefill_16k", "prefill_64k")(r)
        ),
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 3",
        "decode kernel by block size",
        "up to 1.9x between block sizes (vLLM's own kernel, A100)",
        "s",
        "On Hopper vLLM decodes with FlashAttention-3 today, whose time hardly changes.",
        "kernels-h200",
        _block_sizes,
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 3",
        "the same against the card's memory",
        "no number in the texts at hand",
        "s",
        "4.8 TB/s is what the H200's data sheet says; the contiguous form in pages of 64 KB.",
        "kernels-h200",
        _roofline,
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 4",
        "memory that decoding asks for",
        "at most 750 MB/s (A100; 600 MB/s in the first version)",
        "s",
        "Ours replaces requests all the time, so it counts their first pages too.",
        "overlap-h200",
        _rate,
        "vmem bench overlap --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 7, Table 6",
        "prefill throughput, contiguous over paged",
        "1.24x to 1.26x of FA2 paged at 192K, 1.17x to 1.36x of FlashInfer paged (A100)",
        "s",
        "End to end, long prompts of the offline trace; attention is a smaller part of the time on "
        "Hopper and its paged kernels are better.",
        "serve-arxiv-h200",
        _served("serve-arxiv-h200", "offline", "tokens", "tokens/s", "paged16", "paged128"),
        _ARXIV,
    ),
    Row(
        _V,
        "Figure 7",
        "prefill kernels at 128K and 192K",
        "with Table 6: 1.24x to 1.26x of FA2 paged end to end at 192K (A100)",
        "s",
        "The kernels alone, on another GPU.",
        "kernels-long-h200",
        _over_blocks("kernels-long-h200", "fa3", "prefill_128k", "prefill_192k"),
        f"{_KERNELS} --cases long",
    ),
    Row(
        _V,
        "Figure 7",
        "the same by FlashInfer",
        "with Table 6: 1.17x to 1.36x of FlashInfer paged end to end (A100)",
        "s",
        "The kernels alone, on another GPU. A lone prompt takes its batched call; several slots "
        "leave gaps, and take a slower one each.",
        "kernels-flashinfer-long-h100",
        _by_slots,
        "vmem bench kernels --kernels flashinfer --cases prefill_128k,prefill_192k",
    ),
    Row(
        _V,
        "Figure 8",
        "decode throughput, contiguous over paged",
        "as FA2 paged; 1.99x / 1.58x / 1.53x of vLLM's kernel (Yi-6B / Llama-3-8B / Yi-34B, A100)",
        "s",
        "On Hopper vLLM decodes with FlashAttention-3 today, as fast paged as contiguous.",
        "kernels-h200",
        _over_blocks("kernels-h200", "fa3", "decode_b16_16k", "decode_b32_16k", "decode_b128_4k"),
        _KERNELS,
    ),
    Row(
        _V,
        "Table 7",
        "latency of the decode kernels",
        "vLLM's kernel up to 2.8x of FlashAttention-2's (Yi-6B, A100)",
        "s",
        "On Hopper vLLM decodes with FlashAttention-3 today.",
        cannot="vLLM 0.2.7 was not run",
    ),
    Row(
        _V,
        "Figure 9",
        "offline makespan, arXiv trace of 427 requests",
        "1.18x / 1.15x / 1.13x of FA2 paged; 1.19x / 1.23x / 1.14x of FlashInfer paged (A100)",
        "s",
        "The first 8 requests of the trace, Llama-3-8B on one GPU.",
        "serve-arxiv-h200",
        _served("serve-arxiv-h200", "offline", "requests", "requests/min", "paged16", "paged128"),
        _ARXIV,
    ),
    Row(
        _V,
        "Figure 9",
        "the same with prompts by FlashInfer",
        "1.19x / 1.23x / 1.14x of FlashInfer paged (A100)",
        "s",
        "The first 8 requests; decoding is FlashAttention-3's in both.",
        "serve-arxiv-flashinfer-h200",
        _served(
            "serve-arxiv-flashinfer-h200", "offline", "requests", "requests/min", "flashinfer16"
        ),
        f"{_ARXIV} --arms flashinfer,flashinfer16,again",
    ),
    Row(
        _V,
        "Figure 9",
        "how many of the 427 run at a time",
        "not in the texts at hand",
        "s",
        "All 427 replayed, 88K tokens each on average: what a page wastes hardly counts.",
        "capacity",
        _long_batches,
        "vmem bench capacity --trace ARXIV",
    ),
    Row(
        _V,
        "Figure 10",
        "online latency",
        "median latency of a request 42 % / 28 % / 29 % lower than FA2 paged (A100)",
        "s",
        "Another trace with shorter prompts, and the time to the first token instead; their gain "
        "is the faster prefill's.",
        "serve-azure-online-h200",
        _served(
            "serve-azure-online-h200",
            "azure",
            "first50",
            "median time to the first token",
            "paged16",
            "2M",
        ),
        _ONLINE,
    ),
    Row(
        _V,
        "Figure 11",
        "FlashAttention-3 over FlashAttention-2, both unmodified",
        "1.26x to 1.50x end to end (H100)",
        "s",
        "Kernels alone, without the layers around them.",
        "h100",
        _fa3_over_fa2,
        "vmem bench api --only attention --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 12",
        "decoding with memory mapped in the background",
        "spikes of 5 to 15 ms are gone (Llama-3-8B, A100, pages of 2 MB)",
        "s",
        "Pages of 64 KB, so that memory grows 32 times as often.",
        "overlap-h200",
        _overlap,
        "vmem bench overlap --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 12",
        "the same with pages of 2 MB",
        "spikes of 5 to 15 ms are gone (Llama-3-8B, A100, pages of 2 MB)",
        "s",
        "The paper's page size; a growth is 32 times as large and as rare.",
        "overlap-2m-h200",
        lambda r: _overlap(r, "overlap-2m-h200"),
        "vmem bench overlap --fa3 FILE --page 2M",
    ),
    Row(
        _V,
        "Figure 13",
        "prefill of 16K with memory mapped first",
        "1.15x at 64 KB, 1.03x at 2 MB; 1.00x with deferred reclamation (A100)",
        "s",
        "Runs are mapped in one call here; page by page shows what a fragmented pool costs.",
        "deferred-h200",
        _deferred,
        "vmem bench deferred --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 13",
        "the same with pages of 2 MB",
        "1.03x, 1.00x with deferred reclamation (A100)",
        "s",
        "The same four modes in the paper's larger pages.",
        "deferred-2m-h200",
        lambda r: _deferred(r, "deferred-2m-h200"),
        "vmem bench deferred --fa3 FILE --page 2M",
    ),
    Row(
        _V,
        "Figure 14",
        "attention by page size",
        "no difference between 64 KB and 2 MB (A100)",
        "s",
        "No difference here either.",
        "h100",
        _page_size,
        "vmem bench api --only attention --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB",
        "240 / 187, 258 / 203, 68 / 56: 1.28x, 1.27x, 1.21x (OpenChat at 7 requests/s, A100)",
        "t",
        "Their batch is also bound by the arrivals; a replay whose queue is never empty shows "
        "memory alone, on another trace.",
        "capacity",
        _largest,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _V,
        "Figure 15",
        "the same with 40 GB a GPU",
        "only 80 GB in the texts at hand",
        "s",
        "With less memory a request's unused pages weigh as much as before: it is the ratio that "
        "stays.",
        "capacity-40g",
        lambda r: _largest(r, "capacity-40g", _MODELS[:2]),
        "vmem bench capacity --trace AZURE --memory 40G --models Yi-6B,Llama-3-8B --groups 1",
    ),
    Row(
        _V,
        "Figure 15",
        "the same, run and not replayed",
        "1.28x, 1.27x, 1.21x (A100)",
        "t",
        "Azure's trace, all requests at the start, 20 GB for keys and values.",
        "serve-azure-h200",
        _small_pages,
        _AZURE,
    ),
    Row(
        _V,
        "Figure 15",
        "the same under arrivals, 7 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat, A100)",
        "t",
        "Lengths with OpenChat's means, made up; 100 requests on one GPU.",
        "serve-chat-h200",
        lambda r: _small_pages(r, "serve-chat-h200", "chat"),
        _CHAT,
    ),
    Row(
        _V,
        "Figure 15",
        "the same under arrivals, 14 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat at 7 requests/s, A100)",
        "t",
        "More than the card serves, so that requests queue for memory; 200 requests.",
        "serve-chat-14-h100",
        lambda r: _small_pages(r, "serve-chat-14-h100", "chat"),
        _CHAT.replace("--rate 7 --requests 100", "--rate 14 --requests 200"),
    ),
    Row(
        _V,
        "Table 8",
        "tokens in a block",
        "32 to 128 at 64 KB on one or two GPUs",
        "v1",
        "Arithmetic: equal.",
        ours=_blocks,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Table 8",
        "most that a request wastes, 64 KB to 2 MB",
        "Llama-3-8B 4 / 8 / 16 / 128 MB; Yi-34B on 2 GPUs 15 / 30 / 60 / 480 MB",
        "t",
        "Arithmetic: equal.",
        ours=_waste,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Table 9",
        "bandwidth of allocation, 64 KB to 2 MB",
        "7.59 / 14.56 / 27.04 / 35.17 GB/s on one GPU; 70.3 GB/s on two at 2 MB (A100)",
        "t",
        "A call of ours takes longer page by page; pages that are neighbours share one.",
        "h100",
        _bandwidth,
        "vmem bench api --only bandwidth",
    ),
    Row(
        _V,
        "Table 10",
        "its content is in no text that was at hand",
        "not known here",
        "s",
        "The page says so rather than guess.",
        cannot="what it holds is not known",
    ),
    Row(
        _V,
        "all of Yi-34B",
        "a model of 34B on two GPUs",
        "throughputs and latencies above (two A100s)",
        "s",
        "Random weights in its shape, Azure's trace, 100 requests; a cache on each of two ranks.",
        "serve-yi-34b-h100x2",
        _served("serve-yi-34b-h100x2", "offline", "tokens", "tokens/s", "paged16"),
        f"{_SERVE} --model Yi-34B --trace AZURE --workload offline --requests 100 --limit 20G "
        "--longest 8192",
    ),
    Row(
        _T,
        "abstract",
        "end to end over vLLM",
        "1.86x on average (A100)",
        "a",
        "Their baseline is vLLM 0.4.2; the paged arm here has today's kernels.",
        "serve-azure-online-h200",
        _served("serve-azure-online-h200", "azure", "tokens", "tokens/s", "paged16"),
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory freed against a static pool",
        "71.25 % (57 GB of an A100 of 80 GB)",
        "a",
        "It is the load that decides; Azure's trace four times as fast, in 55 GB.",
        "serve-azure-online-h200",
        _freed,
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory by the rate of arrivals",
        "no number in the texts at hand",
        "a",
        "The same run at half the rate; memory over time is a picture.",
        "serve-azure-slow-h200",
        lambda r: _freed(r, "serve-azure-slow-h200"),
        _ONLINE.replace("--speed-up 4 --requests 200", "--speed-up 2 --requests 100"),
    ),
    Row(
        _T,
        "abstract",
        "throughput by batch and length",
        "no number in the texts at hand",
        "a",
        "A batch is bounded by the slots; run once for each number.",
        "serve-slots16-h200",
        _served("serve-slots16-h200", "offline", "tokens", "tokens/s", "paged16", "2M"),
        _AZURE.replace("--requests 300", "--requests 60 --slots 16"),
    ),
    Row(
        _T,
        "abstract",
        "kernels over vLLM's paged one",
        "3.15x on average, at most 3.27x (A100)",
        "a",
        "Both forms are FlashAttention-3's; theirs compares with the kernel of vLLM 0.4.2.",
        "kernels-h200",
        _over_blocks("kernels-h200", "fa3", "decode_b1_16k_tuned", "decode_b128_4k"),
        _KERNELS,
    ),
    Row(
        _T,
        "abstract",
        "prefill after a shared prefix, over SGLang's Triton kernel",
        "2.12x on average, at most 3.92x (A100)",
        "a",
        "Ours is a late chunk of a prompt, contiguous over paged, by the same kernel.",
        "kernels-h200",
        _over_blocks("kernels-h200", "fa3", "chunk_2k_64k", "chunks_512_32k"),
        _KERNELS,
    ),
    Row(
        _T,
        "abstract",
        "the same by the part that is shared",
        "2.12x on average, at most 3.92x (A100)",
        "a",
        "Two prompts of 16K of which nothing, half or seven eighths are cached.",
        "kernels-prefix-h100",
        _over_blocks("kernels-prefix-h100", "fa3", "prefix_none", "prefix_half", "prefix_most"),
        f"{_KERNELS} --cases prefix",
    ),
    Row(
        _T,
        "prefix match",
        "what beginning with a recorded prefix costs",
        "no number in the texts at hand",
        "a",
        "Mapping replaces computing; how long it takes depends on how scattered the pages are.",
        "prefix-map-h200",
        _prefix,
        "vmem bench prefix-map",
    ),
    Row(
        _T,
        "multi-turn",
        "tokens of prompts found in the cache",
        "no number in the texts at hand",
        "a",
        "Mooncake's conversations, replayed without a GPU.",
        "prefixes",
        _hits,
        "vmem bench prefixes --trace MOONCAKE",
    ),
    Row(
        _T,
        "multi-turn",
        "end to end over vLLM",
        "2.42x (A100)",
        "a",
        "The paged arm shares prefixes by the hash of its blocks, as vLLM does today.",
        "serve-prefixes-h200",
        _served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
        _PREFIXES,
    ),
    Row(
        _T,
        "kernels by heads",
        "MHA to MQA",
        "no number in the texts at hand",
        "a",
        "The same kernel in both forms, with the heads of five models.",
        "kernels-heads-h100",
        _over_blocks("kernels-heads-h100", "fa3", *_HEADS),
        f"{_KERNELS} --cases heads",
    ),
    Row(
        _P,
        "Figure 2",
        "memory that holds tokens, by system",
        "20.4 % to 38.2 % in the systems before (A100)",
        "t",
        "Theirs reserve the longest output; pages and blocks waste only what is not full.",
        "capacity",
        _used,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _P,
        "Table 1",
        "room for keys and values, OPT-13B on 40 GB",
        "800 KB a token, 12 GB, 15.7K tokens",
        "s",
        "Arithmetic: equal.",
        ours=_opt,
        command="vmem bench paper",
    ),
    Row(
        _P,
        "Figures 12, 13",
        "against static reservation: request rates, batch",
        "rates 2.7x to 8x, batch 4.3x of Orca (Max) (OPT-13B, ShareGPT, A100)",
        "t",
        "A static slot here is 8,192 tokens, theirs 2,048; all requests at the start.",
        "serve-azure-h200",
        _static,
        _AZURE,
    ),
    Row(
        _P,
        "Figures 14, 15",
        "memory saved by sharing: parallel sampling, beam search",
        "6.1 to 9.8 %, 37.6 to 55.2 % (Alpaca); 16.2 to 30.5 %, 44.3 to 66.3 % (ShareGPT)",
        "t",
        "Counted with the mean lengths of both data sets, for OPT-13B; beams are those of a model "
        "of 135M parameters.",
        "sharing",
        _forks,
        "vmem bench sharing",
    ),
    Row(
        _P,
        "Figure 16",
        "shared prefixes, throughput over Orca (Oracle)",
        "1.67x (80 tokens), 3.58x (341 tokens) (LLaMA-13B, A100)",
        "t",
        "Both arms share prefixes here, on Mooncake's conversations; theirs does not.",
        "serve-prefixes-h200",
        _shared,
        _PREFIXES,
    ),
    Row(
        _P,
        "Figure 17",
        "chatbot, request rate over Orca",
        "2x (OPT-13B, A100)",
        "t",
        "The same run: a conversation's next turn begins with the one before.",
        "serve-prefixes-h200",
        _served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
        _PREFIXES,
    ),
    Row(
        _P,
        "Figure 18a",
        "paged attention kernel over a contiguous one, time",
        "1.20x to 1.26x of FasterTransformer's (A100)",
        "t",
        "FlashAttention-3 on Hopper instead.",
        "kernels-h200",
        _over_blocks("kernels-h200", "fa3", "decode_b16_16k", "prefill_16k"),
        _KERNELS,
    ),
    Row(
        _P,
        "Figure 18b",
        "block sizes",
        "16 to 128 are best on ShareGPT, 16 and 32 on Alpaca (A100)",
        "t",
        "Kernels alone; what large blocks waste is in the capacity table.",
        "kernels-h200",
        _block_sizes,
        _KERNELS,
    ),
    Row(
        _P,
        "Figure 19",
        "swapping against recomputation",
        "comparable at blocks of 16 to 64; recomputation never above 20 % of swapping's latency",
        "t",
        "One request at a time; the cache copies contiguous pages in one piece.",
        "swap-h200",
        _swapping,
        "vmem bench swap --fa3 FILE",
    ),
    Row(
        _P,
        "OPT-66B, OPT-175B",
        "larger models",
        "on 4 and 8 A100s",
        "t",
        "One GPU here.",
        cannot="four and eight A100s",
    ),
)
