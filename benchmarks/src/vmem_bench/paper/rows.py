# SPDX-License-Identifier: MIT
"""One row for each table and figure of the papers: their number, ours, and why they differ.

The papers' numbers are from their abstracts and from public texts that quote them (`SOURCES`);
numbers that only a curve shows are left out. Ours are computed in our_numbers.py, or marked as not
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vmem_bench.paper import our_numbers as ours
from vmem_bench.paper.results import Results

__all__ = ["PAPERS", "ROWS", "SOURCES", "Row"]

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
        file: the results file, without its extension; "" if none is read.
        ours: returns the text of our number. NotMeasured: the result is missing.
        command: the command that measures our number.
        why: why the two differ, in a sentence.
        cannot: why none of our machines can measure it; "" if one can.
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


_HEADS = ("decode_mha", "decode_llama", "decode_yi_6b", "decode_yi_34b", "decode_mqa")
_V, _T, _P = PAPERS
ROWS = (
    Row(
        _V,
        "Tables 2, 3",
        "latency of the memory calls",
        "map 8 / 8.5 / 9 µs at 64 / 128 / 256 KB with a modified driver; CUDA at 2 MB: create 29, "
        "map 2, set access 38, unmap 34, release 23 µs (A100)",
        "t",
        "Ours uses the unmodified driver's external ranges, whose calls allocate and check more "
        "than theirs.",
        "h100",
        ours.calls,
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
        "keys and values per token",
        "64 / 128 / 240 KB: Yi-6B / Llama-3-8B / Yi-34B",
        "s",
        "Arithmetic: equal.",
        ours=ours.kv_bytes,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "§5.1",
        "addresses reserved for Yi-34B on two GPUs, 500 requests of 200K",
        "12 TB per GPU",
        "s",
        "Arithmetic: equal up to rounding.",
        ours=ours.addresses,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Figure 2",
        "prefill kernels, paged over contiguous, time",
        "up to 1.37x (FlashAttention-2) and 1.42x (FlashInfer) (A100)",
        "s",
        "On Hopper a block table costs FlashAttention-3 less, and with blocks of 128 almost "
        "nothing; it still slows FlashInfer.",
        "kernels-h200",
        lambda r: (
            "FA3 "
            + ours.over_blocks("kernels-h200", "fa3", "prefill_16k", "prefill_64k")(r)
            + "; FlashInfer "
            + ours.over_blocks(
                "kernels-flashinfer-h200", "flashinfer", "prefill_16k", "prefill_64k"
            )(r)
        ),
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 3",
        "decode kernel by block size",
        "up to 1.9x between block sizes (vLLM's own kernel, A100)",
        "s",
        "On Hopper vLLM decodes with FlashAttention-3 today, whose time hardly depends on it.",
        "kernels-h200",
        ours.block_sizes,
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 3",
        "the same against the card's memory",
        "no number in the texts at hand",
        "s",
        "The H200's data sheet says 4.8 TB/s; the contiguous form has pages of 64 KB.",
        "kernels-h200",
        ours.roofline,
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 4",
        "rate at which decoding allocates memory",
        "at most 750 MB/s (A100; 600 MB/s in the first version)",
        "s",
        "Ours keeps replacing requests that end, so the new requests' first pages count too.",
        "overlap-h200",
        ours.rate,
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
        ours.served("serve-arxiv-h200", "offline", "tokens", "tokens/s", "paged16", "paged128"),
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
        ours.over_blocks("kernels-long-h200", "fa3", "prefill_128k", "prefill_192k"),
        f"{_KERNELS} --cases long",
    ),
    Row(
        _V,
        "Figure 7",
        "the same by FlashInfer",
        "with Table 6: 1.17x to 1.36x of FlashInfer paged end to end (A100)",
        "s",
        "The kernels alone, on another GPU. A single prompt uses its batched call; several slots "
        "leave gaps, and take a slower one each.",
        "kernels-flashinfer-long-h100",
        ours.by_slots,
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
        ours.over_blocks(
            "kernels-h200", "fa3", "decode_b16_16k", "decode_b32_16k", "decode_b128_4k"
        ),
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
        ours.served(
            "serve-arxiv-h200", "offline", "requests", "requests/min", "paged16", "paged128"
        ),
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
        ours.served(
            "serve-arxiv-flashinfer-h200", "offline", "requests", "requests/min", "flashinfer16"
        ),
        f"{_ARXIV} --arms flashinfer,flashinfer16,again",
    ),
    Row(
        _V,
        "Figure 9",
        "number of the 427 that run at a time",
        "not in the texts at hand",
        "s",
        "All 427 replayed, 88K tokens each on average: a page's waste hardly matters.",
        "capacity",
        ours.long_batches,
        "vmem bench capacity --trace ARXIV",
    ),
    Row(
        _V,
        "Figure 10",
        "online latency",
        "median latency of a request 42 % / 28 % / 29 % lower than FA2 paged (A100)",
        "s",
        "Another trace with shorter prompts, and the time to the first token instead; their gain "
        "comes from faster prefill.",
        "serve-azure-online-h200",
        ours.served(
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
        ours.fa3_over_fa2,
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
        ours.overlap,
        "vmem bench overlap --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 12",
        "the same with pages of 2 MB",
        "spikes of 5 to 15 ms are gone (Llama-3-8B, A100, pages of 2 MB)",
        "s",
        "The paper's page size; memory grows in steps 32 times as large and 32 times as rare.",
        "overlap-2m-h200",
        lambda r: ours.overlap(r, "overlap-2m-h200"),
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
        ours.deferred,
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
        lambda r: ours.deferred(r, "deferred-2m-h200"),
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
        ours.page_size,
        "vmem bench api --only attention --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB",
        "240 / 187, 258 / 203, 68 / 56: 1.28x, 1.27x, 1.21x (OpenChat at 7 requests/s, A100)",
        "t",
        "Arrivals limit their batch too; our replay, on another trace, never has an empty queue, "
        "so only memory limits its batch.",
        "capacity",
        ours.largest,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _V,
        "Figure 15",
        "the same with 40 GB a GPU",
        "only 80 GB in the texts at hand",
        "s",
        "With less memory the ratio is the same: a request wastes as much as before.",
        "capacity-40g",
        lambda r: ours.largest(r, "capacity-40g", ours.MODELS[:2]),
        "vmem bench capacity --trace AZURE --memory 40G --models Yi-6B,Llama-3-8B --groups 1",
    ),
    Row(
        _V,
        "Figure 15",
        "the same, run instead of replayed",
        "1.28x, 1.27x, 1.21x (A100)",
        "t",
        "Azure's trace, all requests at the start, 20 GB for keys and values.",
        "serve-azure-h200",
        ours.small_pages,
        _AZURE,
    ),
    Row(
        _V,
        "Figure 15",
        "the same under arrivals, 7 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat, A100)",
        "t",
        "Synthetic lengths with OpenChat's means; 100 requests on one GPU.",
        "serve-chat-h200",
        lambda r: ours.small_pages(r, "serve-chat-h200", "chat"),
        _CHAT,
    ),
    Row(
        _V,
        "Figure 15",
        "the same under arrivals, 14 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat at 7 requests/s, A100)",
        "t",
        "More than the card can serve, so that requests queue for memory; 200 requests.",
        "serve-chat-14-h100",
        lambda r: ours.small_pages(r, "serve-chat-14-h100", "chat"),
        _CHAT.replace("--rate 7 --requests 100", "--rate 14 --requests 200"),
    ),
    Row(
        _V,
        "Table 8",
        "tokens in a block",
        "32 to 128 at 64 KB on one or two GPUs",
        "v1",
        "Arithmetic: equal.",
        ours=ours.blocks,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Table 8",
        "maximum waste per request, 64 KB to 2 MB",
        "Llama-3-8B 4 / 8 / 16 / 128 MB; Yi-34B on 2 GPUs 15 / 30 / 60 / 480 MB",
        "t",
        "Arithmetic: equal.",
        ours=ours.waste_by_page,
        command="vmem bench paper",
    ),
    Row(
        _V,
        "Table 9",
        "allocation bandwidth, 64 KB to 2 MB",
        "7.59 / 14.56 / 27.04 / 35.17 GB/s on one GPU; 70.3 GB/s on two at 2 MB (A100)",
        "t",
        "Page by page, our call takes longer; adjacent pages share one call.",
        "h100",
        ours.bandwidth,
        "vmem bench api --only bandwidth",
    ),
    Row(
        _V,
        "Table 10",
        "in none of the texts at hand",
        "not known here",
        "s",
        "Not compared.",
        cannot="we have no version of the paper that contains it",
    ),
    Row(
        _V,
        "all of Yi-34B",
        "a 34B model on two GPUs",
        "throughputs and latencies above (two A100s)",
        "s",
        "Random weights in its shape, Azure's trace, 100 requests; two ranks with a cache each.",
        "serve-yi-34b-h100x2",
        ours.served("serve-yi-34b-h100x2", "offline", "tokens", "tokens/s", "paged16"),
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
        ours.served("serve-azure-online-h200", "azure", "tokens", "tokens/s", "paged16"),
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory freed compared with a static pool",
        "71.25 % (57 GB of an A100 of 80 GB)",
        "a",
        "Depends on the load: here Azure's trace, four times as fast, in 55 GB.",
        "serve-azure-online-h200",
        ours.freed,
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory by arrival rate",
        "no number in the texts at hand",
        "a",
        "The same run at half the rate; a picture shows memory over time.",
        "serve-azure-slow-h200",
        lambda r: ours.freed(r, "serve-azure-slow-h200"),
        _ONLINE.replace("--speed-up 4 --requests 200", "--speed-up 2 --requests 100"),
    ),
    Row(
        _T,
        "abstract",
        "throughput by batch and length",
        "no number in the texts at hand",
        "a",
        "The number of slots bounds the batch; one run per number.",
        "serve-slots16-h200",
        ours.served("serve-slots16-h200", "offline", "tokens", "tokens/s", "paged16", "2M"),
        _AZURE.replace("--requests 300", "--requests 60 --slots 16"),
    ),
    Row(
        _T,
        "abstract",
        "kernels over vLLM's paged kernel",
        "3.15x on average, at most 3.27x (A100)",
        "a",
        "Both forms are FlashAttention-3's; theirs compares with the kernel of vLLM 0.4.2.",
        "kernels-h200",
        ours.over_blocks("kernels-h200", "fa3", "decode_b1_16k_tuned", "decode_b128_4k"),
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
        ours.over_blocks("kernels-h200", "fa3", "chunk_2k_64k", "chunks_512_32k"),
        _KERNELS,
    ),
    Row(
        _T,
        "abstract",
        "the same by the shared part",
        "2.12x on average, at most 3.92x (A100)",
        "a",
        "Two prompts of 16K, with nothing, half or seven eighths of each cached.",
        "kernels-prefix-h100",
        ours.over_blocks("kernels-prefix-h100", "fa3", "prefix_none", "prefix_half", "prefix_most"),
        f"{_KERNELS} --cases prefix",
    ),
    Row(
        _T,
        "prefix match",
        "cost of starting from a recorded prefix",
        "no number in the texts at hand",
        "a",
        "Mapping replaces computing; its time depends on how scattered the pages are.",
        "prefix-map-h200",
        ours.prefix,
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
        ours.hits,
        "vmem bench prefixes --trace MOONCAKE",
    ),
    Row(
        _T,
        "multi-turn",
        "end to end over vLLM",
        "2.42x (A100)",
        "a",
        "The paged arm shares prefixes by hashing blocks, as vLLM does today.",
        "serve-prefixes-h200",
        ours.served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
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
        ours.over_blocks("kernels-heads-h100", "fa3", *_HEADS),
        f"{_KERNELS} --cases heads",
    ),
    Row(
        _P,
        "Figure 2",
        "memory that holds tokens, by system",
        "20.4 % to 38.2 % in earlier systems (A100)",
        "t",
        "Earlier systems reserve the longest output; with pages or blocks, only partly filled "
        "pages or blocks are waste.",
        "capacity",
        ours.used,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _P,
        "Table 1",
        "room for keys and values, OPT-13B on 40 GB",
        "800 KB per token, 12 GB, 15.7K tokens",
        "s",
        "Arithmetic: equal.",
        ours=ours.opt,
        command="vmem bench paper",
    ),
    Row(
        _P,
        "Figures 12, 13",
        "compared with static reservation: request rates, batch",
        "rates 2.7x to 8x, batch 4.3x of Orca (Max) (OPT-13B, ShareGPT, A100)",
        "t",
        "A static slot has 8,192 tokens here, 2,048 there; all requests arrive at the start.",
        "serve-azure-h200",
        ours.static,
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
        ours.forks,
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
        ours.shared,
        _PREFIXES,
    ),
    Row(
        _P,
        "Figure 17",
        "chatbot, request rate over Orca",
        "2x (OPT-13B, A100)",
        "t",
        "The same run: a conversation's next turn begins with the turns before it.",
        "serve-prefixes-h200",
        ours.served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
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
        ours.over_blocks("kernels-h200", "fa3", "decode_b16_16k", "prefill_16k"),
        _KERNELS,
    ),
    Row(
        _P,
        "Figure 18b",
        "block sizes",
        "16 to 128 are best on ShareGPT, 16 and 32 are best on Alpaca (A100)",
        "t",
        "Kernels alone; the waste of large blocks is in the capacity table.",
        "kernels-h200",
        ours.block_sizes,
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
        ours.swapping,
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
