# SPDX-License-Identifier: MIT
"""`vmem bench prefixes`: the prefix tree's hit rates and match times.

- Part ``hits`` replays the Mooncake trace on the tree, with the units of several layouts, and on
  hashed 16-token blocks, with the same budgets in bytes. `prefix_replay` describes both.
- Part ``turns`` replays the trace on a real cache on ``host``, and counts the hits whose pages were
  still mapped, so that the request started without a driver call.
- Part ``windows`` replays the trace on the tree of a model like Gemma 3, with five sliding layers
  per full layer, once with windows and once with all rows kept.
- Part ``match`` matches a prompt of 100,000 tokens against 10,000 recorded prefixes. Half of them
  match the prompt up to some token, which splits the prompt's path into many nodes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from pyvmem.bench.record import Part, Record
from pyvmem.bench.report import part_table
from pyvmem.bench.timing import Samples, quiet, time_each
from pyvmem.commands.machine import describe
from pyvmem.layouts.cost import Choice, cost
from pyvmem.layouts.options import add_output, add_workload, count, model_shape, page_name, sizes
from pyvmem.layouts.shapes import ModelShape
from pyvmem.layouts.workload import Request
from pyvmem.models.shapes import LayerShape
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import invalid

__all__ = ["FORMAT", "PARTS", "add_parser", "hits", "match", "run", "turns", "windows"]

FORMAT = "vmem-bench-prefixes/1"
PARTS = ("hits", "turns", "windows", "match")
_SIX = (*(LayerShape(4, 256, window=1024),) * 5, LayerShape(4, 256))
_SLIDING = ModelShape("a model like Gemma 3", 36, 4, 256, layers=_SIX * 6)
_CHUNK = 16_384
_LAYOUTS = ((1, 64 << 10), (8, 64 << 10), (1, 2 << 20))
_BLOCK = 16
_PROMPT = 100_000
_AIM_MS = 1.0


def add_parser(which: Any) -> None:
    """Adds ``prefixes`` to the benchmarks."""
    parser = which.add_parser(
        "prefixes",
        help="hit rates of the prefix tree, and the time of a match",
        description="Replays Mooncake's trace on the prefix tree and on a cache of "
        "hashed blocks at the same budgets, and times matches. Needs no GPU.",
    )
    add = parser.add_argument
    add_workload(parser, "Mooncake's JSONL", "prompts", 2000)
    add("--model", default="Llama-3-8B", help="model whose keys and values are cached (Llama-3-8B)")
    add(
        "--budgets",
        type=sizes,
        default=sizes("10G,20G,50G,100G,200G"),
        help="memory for keys and values (10G,20G,50G,100G,200G)",
    )
    add("--parts", type=_parts, default=PARTS, help=f"some of {', '.join(PARTS)} (all)")
    add("--slots", type=count, default=256, help="slots of the cache in part turns (256)")
    add("--prefixes", type=count, default=10_000, help="recorded prefixes in part match (10000)")
    add("--prompt", type=count, default=_PROMPT, help="tokens of the prompt in part match (100000)")
    add("--rounds", type=count, default=20, help="rounds of part match (20)")
    add_output(parser, "write JSON here, raw samples in raw/")
    parser.set_defaults(run=run)


def _parts(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if strange := [one for one in found if one not in PARTS]:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is not one of {', '.join(PARTS)}")
    return found


def hits(part: Part, shape: ModelShape, prompts: list[Any], budgets: list[int]) -> None:
    """Adds the fraction of prompt tokens found in each cache at each budget."""
    from vmem_bench.prefix_replay import Blocks, Cache, Tree, bound

    total = sum(prompt.length for prompt in prompts)
    part.value(
        "bound",
        "hit rate without a budget, in the trace's blocks of 512",
        "bound",
        100 * bound(prompts) / total,
        "%",
    )
    systems: dict[str, tuple[str, int]] = {}
    for group, page in _LAYOUTS:
        if shape.num_layers % group:
            continue
        unit = cost(shape, Choice(group, page), [Request(1, 1)], page).sharing_unit
        systems[f"g{group}/{page_name(page)}"] = (f"tree, units of {unit} tokens", unit)
    for budget in budgets:
        caches: dict[str, tuple[str, int, Cache]] = {
            f"tree/{label}": (what, unit, Tree(unit, shape.token_bytes, budget))
            for label, (what, unit) in systems.items()
        }
        caches[f"blocks/{_BLOCK}"] = (
            f"blocks of {_BLOCK} tokens by hash",
            _BLOCK,
            Blocks(_BLOCK, shape.token_bytes, budget),
        )
        for label, (what, unit, cache) in caches.items():
            began = time.monotonic()
            row = _hit_rate(part, prompts, cache, label, what, unit, budget)
            row["serve_us"] = 1e6 * (time.monotonic() - began) / len(prompts)


def turns(
    part: Part, shape: ModelShape, prompts: list[Any], budgets: list[int], slots: int
) -> None:
    """Adds a row per budget: the fractions of hits, next turns and hit tokens still mapped."""
    from vmem_bench.prefix_replay import Turns, common_tokens

    unit = cost(shape, Choice(*_LAYOUTS[0]), [Request(1, 1)], _LAYOUTS[0][1]).sharing_unit
    longest, common = max(prompt.length for prompt in prompts), common_tokens(prompts)
    part.notes.append(
        f"{slots} slots, units of {unit} tokens; a next turn finds more than the {common} tokens "
        "that all prompts begin with"
    )
    for budget in budgets:
        gigabytes = f"{budget / 2**30:g}G"
        print(f"{gigabytes}: turns", file=sys.stderr, flush=True)
        with Turns(unit, budget // shape.token_bytes, slots, longest, common) as cache:
            for prompt in prompts:
                cache.serve(prompt)
            cache.cache.check_integrity()
            for name, what, mapped, whole in (
                ("hits", "hits", cache.resumed, cache.hits),
                ("next", "next turns", cache.next_resumed, cache.next_turns),
                ("tokens", "tokens of hits", cache.mapped_tokens, cache.hit_tokens),
            ):
                part.value(
                    f"{name}/{gigabytes}",
                    f"{what} that were still mapped, {gigabytes}",
                    name,
                    100 * mapped / whole if whole else 0.0,
                    "%",
                    budget_bytes=budget,
                    mapped=mapped,
                    of=whole,
                    served=cache.served,
                )


def _hit_rate(
    part: Part, prompts: list[Any], cache: Any, label: str, what: str, unit: int, budget: int
) -> dict[str, Any]:
    """Serves the prompts, adds a row with the cache's hit rate, and returns the rate."""
    from vmem_bench.prefix_replay import hit_tokens

    gigabytes = f"{budget / 2**30:g}G"
    print(f"{gigabytes}: {what}", file=sys.stderr, flush=True)
    found, most = hit_tokens(prompts, cache)
    return part.value(
        f"{label}/{gigabytes}",
        f"{what}, {gigabytes}: hit rate",
        label.partition("/")[0],
        100 * found / sum(prompt.length for prompt in prompts),
        "%",
        budget_bytes=budget,
        most_bytes=most,
        unit_tokens=unit,
        evicted_units=cache.evicted,
    )


def windows(part: Part, prompts: list[Any], budgets: list[int]) -> None:
    """Adds the fractions of prompt tokens found with windows and with all rows kept."""
    from vmem_bench.prefix_replay import Cache, Sliding, Tree

    shape = _SLIDING
    unit = cost(shape, Choice(*_LAYOUTS[0]), [Request(1, 1)], _LAYOUTS[0][1]).sharing_unit
    (slides, full) = shape.configs()
    part.notes.append(
        f"{shape.name}: {shape.num_layers} layers with {full.num_kv_heads} KV heads of "
        f"{full.head_dim}, five of every six with a window of {slides.window:,}; units of {unit} "
        f"tokens, prompts computed in steps of {_CHUNK:,} tokens"
    )
    for budget in budgets:
        caches: dict[str, tuple[str, Cache]] = {
            "full": ("all rows kept", Tree(unit, shape.token_bytes, budget)),
            "windows": (
                "windows",
                Sliding(
                    unit,
                    shape.token_bytes,
                    budget,
                    (slides.num_layers, shape.num_layers),
                    slides.window + slides.window_tile,
                    _CHUNK,
                ),
            ),
        }
        for name, (what, cache) in caches.items():
            _hit_rate(part, prompts, cache, name, what, unit, budget)


def match(part: Part, count: int, length: int, rounds: int) -> None:
    """Adds the times to match one long prompt, by the type of its ids."""
    import numpy as np

    from pyvmem.kvcache.prefix_tree import PrefixTree, TokenIds
    from vmem_bench.prefix_replay import Units

    if count < 1 or length < 200 or rounds < 1:
        raise invalid(
            "a timed match needs a prefix, a prompt of 200 tokens, and a round", op="vmem bench"
        )
    rng = random.Random(1)
    ids = np.array([rng.randrange(128_000) for _ in range(length)], dtype=np.int64)
    tree: PrefixTree[Units] = PrefixTree(32)
    for number in range(count - 1):
        size = rng.randrange(64, min(8000, length))
        other = ids[:size].copy()
        other[rng.randrange(size) if number % 2 else 0] += 128_000
        if not number % 2:
            other[0] += number
        tree.insert(TokenIds(other), lambda start, stop: Units(stop - start))
    tree.insert(TokenIds(ids), lambda start, stop: Units(stop - start))
    forms = {"TokenIds": TokenIds(ids), "numpy int64": ids, "list of int": ids.tolist()}
    nodes = len(tree.match(ids).parts)
    part.notes.append(
        f"{count:,} prefixes of {tree.tokens:,} tokens in {len(tree):,} nodes, units of "
        f"{tree.unit} tokens; the prompt's path has {nodes} nodes"
    )
    with quiet():
        for name, form in forms.items():
            samples = Samples()
            for _ in range(rounds + 1):
                time_each(tree.match, [(form,)] * 10, samples.new_round())
            samples.drop_first_round()
            row = name.replace(" ", "_")
            part.time(row, f"match of {length:,} tokens: {name}", "tree", samples, unit="ms")
            samples = Samples()
            for _ in range(rounds + 1):
                time_each(TokenIds, [(form,)] * 10, samples.new_round())
            samples.drop_first_round()
            part.time(f"{row}/convert", f"of which TokenIds({name})", "tree", samples, unit="ms")


def _aims(record: Record) -> list[dict[str, Any]]:
    row = record.row("match/TokenIds")
    if row is None:
        return []
    applies = record.options["prefixes"] >= 10_000 and record.options["prompt"] >= _PROMPT
    return [
        {
            "id": "prefix_match",
            "what": "match of a 100 k-token prompt against 10 k recorded prefixes, median",
            "value": row["median"],
            "unit": "ms",
            "op": "<=",
            "aim": _AIM_MS,
            "pass": row["median"] <= _AIM_MS,
            "applies": applies,
            "rows": ["match/TokenIds"],
            "why": "" if applies else "smaller than the target's case",
        }
    ]


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from vmem_bench.prefix_replay import conversations, read_prompts

    start = time.monotonic()
    shape = model_shape(args.model)
    prompts = read_prompts(args.trace) if args.trace else conversations(args.requests, args.seed)
    record = Record(
        machine=describe(),
        options={
            "trace": args.trace.name if args.trace else None,
            "seed": None if args.trace else args.seed,
            "model": shape.name,
            "prefixes": args.prefixes,
            "prompt": args.prompt,
            "slots": args.slots,
        },
        method={
            "hit rate": "tokens found divided by the tokens of all prompts; one request at a time"
        },
        started=_now(),
        format=FORMAT,
    )
    title = f"{counted(len(prompts), 'prompt')}, keys and values of {shape.name}"
    todo: dict[str, tuple[str, Callable[[Part], None]]] = {
        "hits": (title, lambda part: hits(part, shape, prompts, args.budgets)),
        "turns": (
            f"{title}: what was still mapped",
            lambda part: turns(part, shape, prompts, args.budgets, args.slots),
        ),
        "windows": (
            f"{counted(len(prompts), 'prompt')}, keys and values of {_SLIDING.name}",
            lambda part: windows(part, prompts, args.budgets),
        ),
        "match": (
            "time of a match",
            lambda part: match(part, args.prefixes, args.prompt, args.rounds),
        ),
    }
    for name in args.parts:
        what, measure = todo[name]
        part = record.part(name, what)
        part.started, began = _now(), time.monotonic()
        measure(part)
        part.status, part.seconds = "done", time.monotonic() - began
    record.aims = _aims(record)
    record.seconds = time.monotonic() - start
    if args.out is not None:
        record.write(args.out)
    if args.json:
        print(json.dumps(record.document(raw=False), indent=1))
    else:
        print("\n\n".join(part_table(part) for part in record.parts.values()))
    return 0


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
