# SPDX-License-Identifier: MIT
"""A row for each table and figure in the papers: the paper's number, ours, and why they differ.

The papers' numbers come from their abstracts and from public texts that quote them (`SOURCES`);
numbers shown only as a curve are left out. Our numbers are computed in our_numbers.py or marked as
not measured.
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
        number: number of the table or figure in the paper (in v3 if the versions differ).
        what: what the table or figure shows.
        theirs: the paper's number, with its hardware.
        source: a key of `SOURCES`.
        file: the results file, without its extension; "" if none is read.
        ours: returns the text of our number; raises NotMeasured if the result is missing.
        command: the command that measures our number.
        why: why the two numbers differ, in a sentence.
        cannot: why none of our machines can measure our number; "" if one of them can.
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
        "latency of memory calls",
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
        "We have one GPU of the next generation.",
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
        "time of prefill kernels, paged relative to contiguous",
        "up to 1.37x (FlashAttention-2) and 1.42x (FlashInfer) (A100)",
        "s",
        "On Hopper, a block table costs FlashAttention-3 less, and almost nothing with blocks of "
        "128; it still slows FlashInfer down.",
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
        "time of the decode kernel by block size",
        "up to 1.9x between block sizes (vLLM's own kernel, A100)",
        "s",
        "On Hopper, vLLM now decodes with FlashAttention-3, whose time hardly depends on the "
        "block size.",
        "kernels-h200",
        ours.block_sizes,
        _KERNELS,
    ),
    Row(
        _V,
        "Figure 3",
        "memory bandwidth that the decode kernel reaches",
        "our sources give no number",
        "s",
        "The H200's data sheet gives 4.8 TB/s; the contiguous form uses 64 KB pages.",
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
        "Our run replaces requests that end, so the first pages of new requests count too.",
        "overlap-h200",
        ours.rate,
        "vmem bench overlap --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 7, Table 6",
        "prefill throughput, contiguous relative to paged",
        "at 192K, 1.24x to 1.26x relative to FA2 paged, 1.17x to 1.36x relative to FlashInfer "
        "paged (A100)",
        "s",
        "Ours is end to end, with the long prompts of the offline trace. On Hopper, attention "
        "takes a smaller part of the time, and the paged kernels are better.",
        "serve-arxiv-h200",
        ours.served("serve-arxiv-h200", "offline", "tokens", "tokens/s", "paged16", "paged128"),
        _ARXIV,
    ),
    Row(
        _V,
        "Figure 7",
        "prefill kernels at 128K and 192K",
        "with Table 6: end to end at 192K, 1.24x to 1.26x relative to FA2 paged (A100)",
        "s",
        "Ours times the kernels alone, on another GPU.",
        "kernels-long-h200",
        ours.over_blocks("kernels-long-h200", "fa3", "prefill_128k", "prefill_192k"),
        f"{_KERNELS} --cases long",
    ),
    Row(
        _V,
        "Figure 7",
        "FlashInfer's prefill kernels at 128K and 192K",
        "with Table 6: end to end, 1.17x to 1.36x relative to FlashInfer paged (A100)",
        "s",
        "Ours times the kernels alone, on another GPU. A single prompt uses FlashInfer's batched "
        "call; several slots leave gaps, and each slot takes a slower call.",
        "kernels-flashinfer-long-h100",
        ours.by_slots,
        "vmem bench kernels --kernels flashinfer --cases prefill_128k,prefill_192k",
    ),
    Row(
        _V,
        "Figure 8",
        "decode throughput, contiguous relative to paged",
        "as fast as FA2 paged; relative to vLLM's kernel 1.99x / 1.58x / 1.53x "
        "(Yi-6B / Llama-3-8B / Yi-34B, A100)",
        "s",
        "On Hopper, vLLM now decodes with FlashAttention-3, which is as fast paged as contiguous.",
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
        "vLLM's kernel up to 2.8x FlashAttention-2's (Yi-6B, A100)",
        "s",
        "On Hopper, vLLM now decodes with FlashAttention-3.",
        cannot="vLLM 0.2.7 was not run",
    ),
    Row(
        _V,
        "Figure 9",
        "offline makespan, arXiv trace of 427 requests",
        "relative to FA2 paged 1.18x / 1.15x / 1.13x, to FlashInfer paged 1.19x / 1.23x / 1.14x "
        "(A100)",
        "s",
        "Ours serves the first 8 requests of the trace, Llama-3-8B on one GPU.",
        "serve-arxiv-h200",
        ours.served(
            "serve-arxiv-h200", "offline", "requests", "requests/min", "paged16", "paged128"
        ),
        _ARXIV,
    ),
    Row(
        _V,
        "Figure 9",
        "offline makespan, prefill with FlashInfer",
        "relative to FlashInfer paged 1.19x / 1.23x / 1.14x (A100)",
        "s",
        "Ours serves the first 8 requests; both arms decode with FlashAttention-3.",
        "serve-arxiv-flashinfer-h200",
        ours.served(
            "serve-arxiv-flashinfer-h200", "offline", "requests", "requests/min", "flashinfer16"
        ),
        f"{_ARXIV} --arms flashinfer,flashinfer16,again",
    ),
    Row(
        _V,
        "Figure 9",
        "number of the 427 requests that run at a time",
        "our sources give no number",
        "s",
        "All 427 are replayed. They have 88K tokens on average, so the waste of a page hardly "
        "matters.",
        "capacity",
        ours.long_batches,
        "vmem bench capacity --trace ARXIV",
    ),
    Row(
        _V,
        "Figure 10",
        "online latency",
        "median latency of a request 42% / 28% / 29% lower than FA2 paged (A100)",
        "s",
        "Ours is the time to first token, on another trace with shorter prompts; the paper's gain "
        "comes from faster prefill.",
        "serve-azure-online-h200",
        ours.served(
            "serve-azure-online-h200",
            "azure",
            "first50",
            "median time to first token",
            "paged16",
            "2M",
        ),
        _ONLINE,
    ),
    Row(
        _V,
        "Figure 11",
        "FlashAttention-3 relative to FlashAttention-2, both unmodified",
        "1.26x to 1.50x end to end (H100)",
        "s",
        "Ours times the kernels alone, without the layers around them.",
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
        "Ours uses 64 KB pages, so memory grows 32 times as often.",
        "overlap-h200",
        ours.overlap,
        "vmem bench overlap --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 12",
        "decoding with 2 MB pages mapped in the background",
        "spikes of 5 to 15 ms are gone (Llama-3-8B, A100, pages of 2 MB)",
        "s",
        "With the paper's page size, memory grows 1/32 as often as with 64 KB pages, by 32 times "
        "as much.",
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
        "Here a run is mapped in one call; mapping single pages shows the cost of a fragmented "
        "pool.",
        "deferred-h200",
        ours.deferred,
        "vmem bench deferred --fa3 FILE",
    ),
    Row(
        _V,
        "Figure 13",
        "prefill of 16K with 2 MB pages mapped first",
        "1.03x, 1.00x with deferred reclamation (A100)",
        "s",
        "Ours runs the same four modes, with the paper's larger pages.",
        "deferred-2m-h200",
        lambda r: ours.deferred(r, "deferred-2m-h200"),
        "vmem bench deferred --fa3 FILE --page 2M",
    ),
    Row(
        _V,
        "Figure 14",
        "attention time by page size",
        "no difference between 64 KB and 2 MB (A100)",
        "s",
        "Ours shows no difference either.",
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
        "In the paper, arrivals limit the batch too. Our replay, of another trace, never has an "
        "empty queue, so only memory limits its batch.",
        "capacity",
        ours.largest,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB, with 40 GB per GPU",
        "our sources give only 80 GB",
        "s",
        "With less memory the ratio stays the same, since a request wastes as much as with 80 GB.",
        "capacity-40g",
        lambda r: ours.largest(r, "capacity-40g", ours.MODELS[:2]),
        "vmem bench capacity --trace AZURE --memory 40G --models Yi-6B,Llama-3-8B --groups 1",
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB, served instead of replayed",
        "1.28x, 1.27x, 1.21x (A100)",
        "t",
        "Ours serves Azure's trace, with all requests at the start and 20 GB for keys and values.",
        "serve-azure-h200",
        ours.small_pages,
        _AZURE,
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB, at 7 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat, A100)",
        "t",
        "Ours serves 100 requests on one GPU, of synthetic lengths with OpenChat's means.",
        "serve-chat-h200",
        lambda r: ours.small_pages(r, "serve-chat-h200", "chat"),
        _CHAT,
    ),
    Row(
        _V,
        "Figure 15",
        "largest batch, 64 KB / 2 MB, at 14 requests/s",
        "1.28x, 1.27x, 1.21x (OpenChat at 7 requests/s, A100)",
        "t",
        "Ours serves 200 requests, which arrive faster than the GPU can serve them and queue for "
        "memory.",
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
        "not described in our sources",
        "unknown to us",
        "s",
        "Not compared.",
        cannot="we have no version of the paper that contains it",
    ),
    Row(
        _V,
        "all of Yi-34B",
        "a 34B model on two GPUs",
        "the throughputs and latencies above (two A100s)",
        "s",
        "Ours serves 100 requests of Azure's trace with random weights of the model's shape, on "
        "two ranks with a cache each.",
        "serve-yi-34b-h100x2",
        ours.served("serve-yi-34b-h100x2", "offline", "tokens", "tokens/s", "paged16"),
        f"{_SERVE} --model Yi-34B --trace AZURE --workload offline --requests 100 --limit 20G "
        "--longest 8192",
    ),
    Row(
        _T,
        "abstract",
        "end to end, relative to vLLM",
        "1.86x on average (A100)",
        "a",
        "The paper's baseline is vLLM 0.4.2; our paged arm uses today's kernels.",
        "serve-azure-online-h200",
        ours.served("serve-azure-online-h200", "azure", "tokens", "tokens/s", "paged16"),
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory freed compared with a static pool",
        "71.25% (57 GB of an 80 GB A100)",
        "a",
        "The share depends on the load: ours is Azure's trace at four times its rate, in 55 GB.",
        "serve-azure-online-h200",
        ours.freed,
        _ONLINE,
    ),
    Row(
        _T,
        "abstract",
        "memory freed at half the arrival rate",
        "our sources give no number",
        "a",
        "As in the row above, at half the arrival rate; a picture shows memory over time.",
        "serve-azure-slow-h200",
        lambda r: ours.freed(r, "serve-azure-slow-h200"),
        _ONLINE.replace("--speed-up 4 --requests 200", "--speed-up 2 --requests 100"),
    ),
    Row(
        _T,
        "abstract",
        "throughput by batch and length",
        "our sources give no number",
        "a",
        "The number of slots bounds the batch; each number is a separate run.",
        "serve-slots16-h200",
        ours.served("serve-slots16-h200", "offline", "tokens", "tokens/s", "paged16", "2M"),
        _AZURE.replace("--requests 300", "--requests 60 --slots 16"),
    ),
    Row(
        _T,
        "abstract",
        "kernels relative to vLLM's paged kernel",
        "3.15x on average, at most 3.27x (A100)",
        "a",
        "Our two forms are both FlashAttention-3; the paper compares with vLLM 0.4.2's kernel.",
        "kernels-h200",
        ours.over_blocks("kernels-h200", "fa3", "decode_b1_16k_tuned", "decode_b128_4k"),
        _KERNELS,
    ),
    Row(
        _T,
        "abstract",
        "prefill after a shared prefix, relative to SGLang's Triton kernel",
        "2.12x on average, at most 3.92x (A100)",
        "a",
        "Ours is a late chunk of a prompt: paged relative to contiguous, with the same kernel.",
        "kernels-h200",
        ours.over_blocks("kernels-h200", "fa3", "chunk_2k_64k", "chunks_512_32k"),
        _KERNELS,
    ),
    Row(
        _T,
        "abstract",
        "prefill after a shared prefix, by the shared part",
        "2.12x on average, at most 3.92x (A100)",
        "a",
        "Ours prefills two prompts of 16K, of which nothing, half or seven eighths is cached.",
        "kernels-prefix-h100",
        ours.over_blocks("kernels-prefix-h100", "fa3", "prefix_none", "prefix_half", "prefix_most"),
        f"{_KERNELS} --cases prefix",
    ),
    Row(
        _T,
        "prefix match",
        "cost of starting from a recorded prefix",
        "our sources give no number",
        "a",
        "Mapping replaces recomputation; its time depends on how scattered the pages are.",
        "prefix-map-h200",
        ours.prefix,
        "vmem bench prefix-map",
    ),
    Row(
        _T,
        "multi-turn",
        "prompt tokens found in the cache",
        "our sources give no number",
        "a",
        "Ours replays Mooncake's conversations, without a GPU.",
        "prefixes",
        ours.hits,
        "vmem bench prefixes --trace MOONCAKE",
    ),
    Row(
        _T,
        "multi-turn",
        "end to end, relative to vLLM",
        "2.42x (A100)",
        "a",
        "Our paged arm shares prefixes by hashing blocks, as vLLM does today.",
        "serve-prefixes-h200",
        ours.served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
        _PREFIXES,
    ),
    Row(
        _T,
        "kernels by heads",
        "MHA to MQA",
        "our sources give no number",
        "a",
        "Ours compares both forms of one kernel, with the heads of five models.",
        "kernels-heads-h100",
        ours.over_blocks("kernels-heads-h100", "fa3", *_HEADS),
        f"{_KERNELS} --cases heads",
    ),
    Row(
        _P,
        "Figure 2",
        "memory that holds tokens, by system",
        "20.4% to 38.2% in earlier systems (A100)",
        "t",
        "Earlier systems reserve memory for the longest output; with pages or blocks, only the "
        "partly filled ones waste memory.",
        "capacity",
        ours.used,
        "vmem bench capacity --trace AZURE",
    ),
    Row(
        _P,
        "Table 1",
        "memory for keys and values, OPT-13B on 40 GB",
        "800 KB per token, 12 GB, 15.7K tokens",
        "s",
        "Arithmetic: equal.",
        ours=ours.opt,
        command="vmem bench paper",
    ),
    Row(
        _P,
        "Figures 12, 13",
        "request rate and batch relative to static reservation",
        "rate 2.7x to 8x, batch 4.3x relative to Orca (Max) (OPT-13B, ShareGPT, A100)",
        "t",
        "Our static slots have 8,192 tokens, the paper's 2,048; our requests all arrive at the "
        "start.",
        "serve-azure-h200",
        ours.static,
        _AZURE,
    ),
    Row(
        _P,
        "Figures 14, 15",
        "memory saved by sharing: parallel sampling, beam search",
        "6.1 to 9.8%, 37.6 to 55.2% (Alpaca); 16.2 to 30.5%, 44.3 to 66.3% (ShareGPT)",
        "t",
        "Ours is computed for OPT-13B from the mean lengths of both data sets; the beams come from "
        "a model with 135M parameters.",
        "sharing",
        ours.forks,
        "vmem bench sharing",
    ),
    Row(
        _P,
        "Figure 16",
        "throughput with shared prefixes, relative to Orca (Oracle)",
        "1.67x (80 tokens), 3.58x (341 tokens) (LLaMA-13B, A100)",
        "t",
        "Both our arms share prefixes, on Mooncake's conversations; the paper's baseline does not.",
        "serve-prefixes-h200",
        ours.shared,
        _PREFIXES,
    ),
    Row(
        _P,
        "Figure 17",
        "request rate of a chatbot, relative to Orca",
        "2x (OPT-13B, A100)",
        "t",
        "Ours is the same run as for figure 16: each turn of a conversation begins with the turns "
        "before it.",
        "serve-prefixes-h200",
        ours.served("serve-prefixes-h200", "prefixes", "tokens", "tokens/s", "paged16"),
        _PREFIXES,
    ),
    Row(
        _P,
        "Figure 18a",
        "time of a paged attention kernel relative to a contiguous one",
        "1.20x to 1.26x relative to FasterTransformer's (A100)",
        "t",
        "Ours is FlashAttention-3 on Hopper.",
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
        "Ours times the kernels alone; the capacity benchmark measures the waste of large blocks.",
        "kernels-h200",
        ours.block_sizes,
        _KERNELS,
    ),
    Row(
        _P,
        "Figure 19",
        "swapping compared with recomputation",
        "comparable at blocks of 16 to 64; recomputation never above 20% of swapping's latency",
        "t",
        "Ours swaps one request at a time; the cache copies contiguous pages in one piece.",
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
        "We have one GPU.",
        cannot="four and eight A100s",
    ),
)
