# SPDX-License-Identifier: MIT
"""`vmem bench sglang`: SGLang on the elastic pool, compared with stock SGLang on the same device.

Engines run one at a time, each in a new process, in the order stock, elastic, elastic, stock, so
that drift in the machine's speed affects both equally. A ratio is the mean over pairs of adjacent
turns, with its confidence interval. The result file is written after each turn. share.py implements
the ``share`` part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pyvmem.bench import report
from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted, said
from pyvmem.commands.tables import table
from pyvmem.layouts.options import count, natural, positive, size
from vmem_bench.command import Command, WrongResult, add_common, imports, open_command
from vmem_bench.sglang import share
from vmem_bench.sglang.engine import STEPS
from vmem_bench.sglang.tables import HEAD, SHARED, body, shared, spread
from vmem_bench.sglang.turns import SHAPES, Found, Turns
from vmem_bench.vllm.engines import until_time_up
from vmem_bench.vllm.full import there_and_back

__all__ = ["ARMS", "add_parser", "run"]

ARMS = ("stock", "elastic")

_METHOD = {
    "engines": "one at a time, each in a new process; turns: stock, elastic, elastic, stock; "
    "random weights, greedy; half_width: half a 95% confidence interval, over turns for a ratio, "
    "otherwise over rounds",
    "same": "answers identical to those of stock's first turn, one request at a time (alone) or "
    "all together (batch); to the same engine's earlier answers, with cached prefixes (again) or "
    "after sleep (slept)",
    "rate": "new tokens per second of requests submitted together; the cache is flushed before "
    "each round, so an elastic engine starts with only page 0 mapped; the first round is discarded",
    "first": "one request for one token: after an idle period, without prefixes (rest), and right "
    "after that request (again)",
    "device": "bytes of the device in use (cuMemGetInfo) minus those before the engine; highest: "
    "sampled every 50 ms in the first round with the most requests",
    "mapped": "bytes of keys and values, by the ledger",
    "sleep": "release_memory_occupation and resume_memory_occupation, kv_cache",
}

Turn = Mapping[str, list[Found]]


def measure(command: Command, part: Part) -> None:
    """Runs the engines in turn and adds the rows after each turn."""
    args, slowest = command.args, 0.0
    requests = [4] if command.quick else sorted(args.requests)
    turns: dict[str, list[Found]] = {arm: [] for arm in ARMS}
    order = list(there_and_back(ARMS, args.turns))
    with (
        tempfile.TemporaryDirectory(prefix="vmem-sglang-") as name,
        closing(Turns(command, Path(name), requests, order)) as engines,
    ):
        command.record.options |= {"engine": _shown(engines.options())}
        for number, arm in enumerate(order):
            if not command.deadline.allows(max(slowest, 30.0)):
                part.not_run(f"turn/{number}", f"{arm}: the deadline passed")
                continue
            engines.prepare(number)
            began = command.deadline.used
            found = engines.run(number)
            for step in STEPS[: len(STEPS) - (arm == "stock")]:
                if step not in found:
                    part.not_run(f"turn/{number}/{step}", f"{arm}: the deadline passed")
            slowest = max(slowest, command.deadline.used - began)
            turns[arm].append(found)
            part.rows.clear()
            _rows(part, turns)
            command.write()
            command.show(f"{arm}: {_said(found)}")
    if not part.rows:
        raise WrongResult("no engine started before the deadline")
    _check(turns)


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "model_path"}


def _said(found: Found) -> str:
    rates = (
        f"{statistics.median(r):,.0f} tokens/s of {n}" for n, r in found.get("rate", {}).items()
    )
    return ", ".join(rates) or "stopped before the end of its first load"


def _check(turns: Turn) -> None:
    """Checks that each elastic engine's answers to single requests match a stock engine's.

    Raises:
        WrongResult: an elastic engine's answers do not match those of any stock engine.
    """
    stock, mine = (
        [one["tokens"]["alone"] for one in turns[arm] if "tokens" in one] for arm in ARMS
    )
    if stock and any(one not in stock for one in mine):
        raise WrongResult("answers to single requests differ from stock's")


# ---- rows ----------------------------------------------------------------------------------------


def _rows(part: Part, turns: Turn) -> None:
    for number in _counts(turns):
        _add(part, turns, ("rate", number), "new tokens per second", "tokens/s")
    for when, what in (
        ("rest", "after an idle period"),
        ("again", "right after another request"),
    ):
        _add(part, turns, ("first", when), f"time to first token, {what}", "ms")
    for arm in ARMS:
        _memory(part, arm, turns[arm])
        for name in ("release", "resume"):
            found = [one["sleep"][name] for one in turns[arm] if "sleep" in one]
            _value(part, f"sleep/{name}/{arm}", "time of the call", arm, "ms", found)
        found = [one["start"]["seconds"] for one in turns[arm] if "start" in one]
        _value(part, f"start/{arm}", "time to start, SGLang imported", arm, "s", found)
        for name in ("maps", "waits", "handles"):
            found = [one["sleep"][name] for one in turns[arm] if "sleep" in one]
            _value(part, f"{name}/{arm}", "at the end, by the ledger", arm, name, found)
        _same(part, arm, turns)


def _counts(turns: Turn) -> list[int]:
    return sorted({number for arm in ARMS for one in turns[arm] for number in one.get("rate", {})})


def _value(part: Part, row: str, what: str, arm: str, unit: str, found: list[float]) -> None:
    """Adds a row with the median over the turns, unless there are no values."""
    if found:
        part.value(row, what, arm, statistics.median(found), unit)


def _add(part: Part, turns: Turn, key: tuple[str, str | int], what: str, unit: str) -> None:
    """Adds a row for each arm, and one for the mean ratio between the arms' medians per turn."""
    step, name = key
    row = f"{step}/{name}"
    medians = []
    for arm in ARMS:
        each: list[list[float]] = [one.get(step, {}).get(name, []) for one in turns[arm]]
        medians.append([statistics.median(one) for one in each if one])
        if rounds := [value for one in each for value in one]:
            middle = statistics.median(rounds)
            part.value(f"{row}/{arm}", what, arm, middle, unit, **spread(rounds))
    stock, elastic = medians
    ratios = [mine / other for mine, other in zip(elastic, stock, strict=False)]
    if ratios:
        mean = statistics.fmean(ratios)
        part.value(
            f"over/{row}", f"{what}, relative to stock", "elastic", mean, "x", **spread(ratios)
        )


def _memory(part: Part, arm: str, found: Iterable[Found]) -> None:
    seen: dict[str, list[float]] = {}
    for one in found:
        looks = {**one.get("memory", {})}
        for when, step in (("start", "start"), ("asleep", "sleep")):
            looks |= {when: one[step]["memory"]} if step in one else {}
        for when, look in looks.items():
            for kind, value in look.items():
                seen.setdefault(f"{kind}/{when}", []).append(value)
    for name, values in seen.items():
        part.value(f"{name}/{arm}", "bytes", arm, statistics.median(values), "bytes")


def _same(part: Part, arm: str, turns: Turn) -> None:
    """Counts answers that match those of stock's first turn or the engine's own earlier ones."""
    of = {"alone": "stock's first turn", "again": "before", "batch": "stock's first turn"}
    stock = [one["tokens"] for one in turns["stock"] if "tokens" in one]
    mine = [one for one in turns[arm] if "tokens" in one]
    if not mine:
        return
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in (*of, "slept")}
    for one in mine:
        tokens = one["tokens"]
        pairs["again"].append((tokens["again"], tokens["alone"]))
        for name in ("alone", "batch") if stock and tokens is not stock[0] else ():
            pairs[name].append((tokens[name], stock[0][name]))
        if "sleep" in one:
            pairs["slept"].append((one["sleep"]["tokens"], tokens["alone"]))
    for name, found in pairs.items():
        equal = [a == b for mine_, other in found for a, b in zip(mine_, other, strict=True)]
        if equal:
            what = f"answers as {of.get(name, 'before')}"
            part.value(f"same/{name}/{arm}", what, arm, sum(equal), "answers", of=len(equal))
    tokens = mine[0]["tokens"]
    distinct = len({token for answer in tokens["alone"] for token in answer})
    part.value(f"distinct/{arm}", "different tokens in the answers", arm, distinct, "tokens")
    part.value(f"hits/{arm}", "prompts' tokens found in the cache", arm, tokens["hits"], "tokens")


# ---- the command ---------------------------------------------------------------------------------


def _report(command: Command, part: Part) -> str:
    if not part.rows:
        return report.document(command.record)
    rows = {row["id"].partition("/")[2]: row for row in part.rows}
    options = command.record.options
    versions = ", ".join(f"{name} {options[name]}" for name in share.ENGINES if name in options)
    head = f"== {part.name}, {versions}: {part.status}, {part.seconds:.0f} s"
    lines = table(SHARED, shared(rows), 1) if part.name == "share" else table(HEAD, body(rows), 1)
    rest = [part.why] if part.why else []
    rest += [f"not run: {one['id']}: {one['why']}" for one in part.missing]
    return "\n".join([report.head(command.record), "", head, lines, *rest])


PARTS: dict[str, tuple[str, dict[str, str], Callable[[Command, Part], None]]] = {
    "sglang": ("the elastic pool and stock SGLang", _METHOD, measure),
    "share": ("vLLM and SGLang, busy alternately", share.METHOD, share.measure),
}
_NAMES = {
    "sglang": ("requests", "turns", "prompt", "answer", "page_size", "idle", "repeats"),
    "share": ("rounds", "bursts", "burst", "period", "prefixes", "page_size"),
}


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0 on success, 1 on failure, 2 for bad usage or an unusable back end, or 3 if SGLang is
    missing.
    """
    args.shape = args.shape or ("1b" if args.part == "share" else "8b")
    if args.part == "share" and args.shape == "mla":
        print("vmem bench: --part share has no --shape mla", file=sys.stderr)
        return 2
    if args.quick:
        args.prompt, args.answer, args.repeats, args.idle = 48, 8, 1, 0.5
        args.bursts, args.period = min(args.bursts, 2), min(args.period, 4.0)
    title, method, run_part = PARTS[args.part]
    command = open_command(
        args,
        "sglang",
        method,
        part=args.part,
        shape="tiny" if args.quick else args.shape,
        env=dict(args.env),
        **{name: getattr(args, name) for name in _NAMES[args.part]},
    )
    if command is None:
        return 2
    part = command.record.part(args.part, title)
    with conducted(part):
        if args.part == "share" or imports(command, part, "sglang"):
            with until_time_up(part):
                run_part(command, part)
    command.write()
    return said(command.record, args, lambda: _report(command, part))


def _requests(text: str) -> list[int]:
    found = [count(one) for one in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected different numbers")
    return found


def _named(text: str) -> tuple[str, str]:
    name, equal, value = text.partition("=")
    if not name or not equal:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _option(text: str) -> tuple[str, Any]:
    name, value = _named(text)
    try:
        return name, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is not JSON") from None


def add_parser(which: Any) -> None:
    """Adds `sglang` to the benchmarks."""
    parser = which.add_parser(
        "sglang",
        help="SGLang on the elastic pool, compared with stock SGLang",
        description="Runs SGLang engines with the same random weights one at a time, alternately "
        "with and without the elastic pool, and compares tokens, time and memory. Needs SGLang.",
    )
    add_common(parser, 560)
    add = parser.add_argument
    add("--part", choices=list(PARTS), default="sglang",
        help="compare with stock SGLang, or share a device with vLLM (sglang)")  # fmt: skip
    add("--shape", choices=list(SHAPES), help="size of the model (8b; share: 1b)")
    add("--turns", type=count, default=2, metavar="N", help="turns of each arm (2)")
    add("--requests", type=_requests, default=[16, 64, 256],
        metavar="N,...", help="requests submitted together (16,64,256)")  # fmt: skip
    add("--prompt", type=count, default=1024, metavar="N", help="tokens of a prompt (1024)")
    add("--answer", type=count, default=128, metavar="N", help="tokens of an answer (128)")
    add("--repeats", type=count, default=2, metavar="N", help="rounds in a turn (2)")
    add("--idle", type=positive, default=3.0, metavar="S", help="seconds of an idle period (3)")
    add(
        "--page-size", type=count, default=16, metavar="N", help="SGLang's page size in tokens (16)"
    )
    add("--page", type=size, default=0, metavar="SIZE",
        help="page size of the pool, such as 2M (the pool's choice)")  # fmt: skip
    add("--tokens", type=natural, default=0, metavar="N",
        help="tokens of the KV cache (enough for the largest number of requests)")  # fmt: skip
    add("--attention", default="", metavar="NAME",
        help="attention back end (triton; CPU: torch_native)")  # fmt: skip
    add("--option", type=_option, action="append", default=[], metavar="NAME=JSON",
        help="any option of sglang.Engine")  # fmt: skip
    add("--env", type=_named, action="append", default=[], metavar="NAME=VALUE",
        help="environment of the elastic engines, such as VMEM_LIMIT=8G")  # fmt: skip
    add("--kv-memory", type=size, default=0, metavar="SIZE",
        help="share: memory of both engines (98,304 tokens: 3G for 1b, 12G for 8b)")  # fmt: skip
    add("--rounds", type=count, default=4, metavar="N", help="share: rounds of each arm (4)")
    add("--bursts", type=count, default=3, metavar="N",
        help="share: bursts of each engine per round (3)")  # fmt: skip
    add("--burst", type=positive, default=0.8, metavar="X",
        help="share: size of a burst's tokens, as a fraction of the memory (0.8)")  # fmt: skip
    add("--period", type=positive, default=8.0, metavar="S",
        help="share: seconds between an engine's bursts (8)")  # fmt: skip
    add("--no-prefixes", dest="prefixes", action="store_false",
        help="share: disable both engines' prefix caches")  # fmt: skip
    add("--vllm-path", default="", metavar="DIR:...",
        help="share: PYTHONPATH of vLLM (this command's)")  # fmt: skip
    add("--sglang-path", default="", metavar="DIR:...",
        help="share: PYTHONPATH of SGLang (this command's)")  # fmt: skip
    parser.set_defaults(run=run)
