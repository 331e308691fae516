# SPDX-License-Identifier: MIT
"""`vmem bench serve`: serves requests with arms that differ only in the cache.

All arms share one process, model, kernel library and loop. Each has its own store of keys and
values (`vmem_bench.serving.stores`), with the same amount of memory. The arms take turns, in an
order that rotates every round. The first arm is the reference for the others. It may run a second
time as the arm `again`, which shows the spread between identical arms.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Part
from pyvmem.bench.running import put_together
from pyvmem.bench.timing import quiet
from pyvmem.errors import VMemError
from pyvmem.layouts.options import size
from pyvmem.layouts.workload import Arrival, Request, generate, poisson, read_arrivals
from pyvmem.plumbing.paths import existing_file
from vmem_bench.command import Command, WrongResult, add_common, open_command, run_on_device
from vmem_bench.serving.results import AGAIN, VLLM, add_aims, add_rows, figures, join

if TYPE_CHECKING:
    import torch

    from vmem_bench.decoder import Decoder, Sizes
    from vmem_bench.serving.forward import Forward
    from vmem_bench.serving.loop import Outcome
    from vmem_bench.serving.ranks import Group, Run
    from vmem_bench.serving.stores import Ints, Store

__all__ = ["ARMS", "WORKLOADS", "Arm", "add_parser", "run"]

_BOUND = 0.05  # relative to the largest logit: bfloat16 has 8 bits, and errors add up over layers
_TILE = 191  # rows that FlashAttention-3's contiguous call may read past a request's end
_BLOCK = 32  # rows per block in paged calls over slots, which do not read past a request's end
_CONTENT = 512  # tokens per content id
_CHAT = (1800, 744)  # mean number of tokens in OpenChat prompts and answers
_TALKS = 4  # number of synthetic conversations that are interleaved
_FEW = 16  # maximum number of slots for the comparison of logits
_SPARE = 8 << 30  # bytes left free for activations, graphs and libraries
_METHOD = {
    "time": "host clock; a token is ready when the wait for its step returns",
    "turns": "the arms take turns, in rotating order; values are medians of the rounds",
    "tokens": "given, so that all arms compute the same; sampled tokens are dropped",
    "host": "time in the calls of the cache or block manager, on the thread that plans the steps",
    "checked": "the logits of all requests in a small workload against the reference arm's",
    "batch": "requests in a step, weighted by the step's time",
}


@dataclass(frozen=True)
class Arm:
    """A way to store keys and values.

    Attributes:
        what: description of the arm.
        kind: "slots", "paged", "static", or "vllm", which is an engine with its own loop.
        prefill, decode: how the attention kernel is called, "contiguous" or "paged".
        page: page size of slots in bytes; 0 to use the command's.
        group: layers per tensor of slots; 0 to use the command's.
        block: rows per block of the paged call; 0 if it is not used.
        backend: back end of slots; "" to use the command's.
        library: the attention library; see `Kernels`.
    """

    what: str
    kind: str
    prefill: str = ""
    decode: str = ""
    page: int = 0
    block: int = _BLOCK
    backend: str = ""
    group: int = 0
    library: str = "fa3"


ARMS = {
    "contiguous": Arm("contiguous, the best kernel for each phase", "slots", "contiguous", "paged"),
    "fa3": Arm("contiguous, one kernel", "slots", "contiguous", "contiguous", block=0),
    "256K": Arm(
        "contiguous, 256 KB pages with 4 layers",
        "slots",
        "contiguous",
        "paged",
        256 << 10,
        group=4,
    ),
    "2M": Arm("contiguous, pages of 2 MB", "slots", "contiguous", "paged", 2 << 20, backend="cuda"),
    "paged16": Arm("blocks of 16 tokens", "paged", "paged", "paged", block=16),
    "paged128": Arm("blocks of 128 tokens", "paged", "paged", "paged", block=128),
    "static": Arm("each slot has memory for the longest request", "static", "contiguous", "paged"),
    "fa2": Arm(
        "contiguous, torch's FlashAttention-2",
        "slots",
        *("contiguous",) * 2,
        block=0,
        library="fa2",
    ),
    "flashinfer": Arm(
        "contiguous, prompts by FlashInfer", "slots", "contiguous", "paged", library="flashinfer"
    ),
    "flashinfer16": Arm(
        *("blocks of 16 tokens, prompts by FlashInfer", "paged", "paged", "paged"),
        block=16,
        library="flashinfer",
    ),
    VLLM: Arm("vLLM itself", VLLM),
}
WORKLOADS = {
    "azure": "lengths of Azure's conversations, or of a trace; arrivals at its times",
    "offline": "a trace's lengths, all arriving at the start",
    "online": "a trace's lengths, Poisson arrivals at --rate",
    "prefixes": "conversations with common prefixes (Mooncake's, or synthetic), which are shared",
    "chat": "OpenChat's mean lengths (1.8K and 744 tokens), Poisson arrivals",
}


class _Runner:
    """Runs the benchmark's arms on one model."""

    def __init__(
        self,
        command: Command,
        model: Decoder,
        longest: int,
        limit: int,
        device: torch.device,
        group: Group | None,
    ) -> None:
        self.command, self.model, self.device = command, model, device
        self.group = group
        self.longest, self.limit = longest, limit
        self.prefixes = command.args.workload == "prefixes"
        self._stores: list[Store] = []
        self.gpu = device.type == "cuda"

    def arm(self, name: str) -> Arm:
        """Returns the arm called `name`; for `again`, the first arm."""
        return ARMS[self.command.args.arms[0] if name == AGAIN else name]

    def words(self, name: str) -> str:
        """Returns a description of the arm."""
        return self.arm(name).what + (", again" if name == AGAIN else "")

    def _tiles(self, arm: Arm) -> bool:
        """Returns whether the arm's contiguous call reads whole tiles, past a request's end."""
        return self.gpu and arm.library == "fa3"

    def _store(self, arm: Arm, slots: int, limit: int, budget: int) -> Store:
        from pyvmem.kvcache.layout import Layout
        from vmem_bench.serving.stores import Paged, SharedPaged, Slots, Static

        args, sizes = self.command.args, self.model.sizes
        if arm.kind != "slots":
            kind = Static if arm.kind == "static" else SharedPaged if self.prefixes else Paged
            shape = (self.longest, slots, limit, arm.block, self.device)
            return kind(sizes, *shape)
        on_host = self.command.backend == "host"
        page = arm.page or args.page or self.command.page
        if on_host and arm.page:
            page = 16 * self.command.page  # holds about as many rows as a tiny model's request
        config = sizes.config(
            max_batch=slots,
            max_seq_len=self.longest,
            page_size=page,
            group_size=gcd(arm.group or args.group, sizes.layers),
            memory_limit=limit,
            zero_fill=False,  # like the other arms, which do not zero memory between requests
            overread_rows=_TILE if self._tiles(arm) else 0,
            overread_decode=self._tiles(arm) and arm.decode == "contiguous",
        )
        # Keep enough of a free slot mapped for the first chunk of a prompt.
        first = Layout(config, page).pages_for_step(0, min(budget, self.longest))
        config = replace(config, eager_pages=first)
        backend = self.command.backend if on_host or not arm.backend else arm.backend
        options = {"backend": backend, "device": args.device}
        ranks = self.group.size if self.group is not None else 1
        return Slots(config, sizes, arm.block, self.prefixes, ranks, **options)

    def serve(
        self,
        name: str,
        arrivals: Sequence[Arrival],
        *,
        budget: int,
        slots: int = 0,
        limit: int = 0,
        limit_s: float = float("inf"),
        observer: Any = None,
    ) -> Outcome:
        """Serves the arrivals with a new store; `slots` and `limit` default to the command's."""
        from vmem_bench.serving.loop import serve
        from vmem_bench.serving.ranks import Run

        run = Run(name, slots or self.command.args.slots, limit or self.limit, budget)
        tokens = partial(_tokens, self.model.sizes)
        if self.arm(name).kind == VLLM:
            return self._vllm(run, arrivals, tokens)
        forward: Forward
        if self.group is None:
            forward = self.open(run)
        else:
            self.group.tell(run)
            forward = self.group.make(partial(self.open, run))
        with closing(forward):
            forward.warm_up()
            with quiet():
                return serve(
                    forward,
                    arrivals,
                    tokens,
                    budget=max(budget, forward.store.slots),
                    ahead=self.command.args.ahead,
                    limit_s=limit_s,
                    observer=observer,
                )

    def _vllm(self, run: Run, arrivals: Sequence[Arrival], tokens: Any) -> Outcome:
        from vmem_bench.serving import stock_vllm

        if self.group is not None:
            raise ValueError("vLLM is compared on one rank")
        if self.prefixes:
            raise ValueError("the prefixes that vLLM finds are not measured")
        return stock_vllm.serve(
            self.command,
            self.model.sizes,
            arrivals,
            tokens,
            slots=run.slots,
            limit=run.limit,
            budget=run.budget,
            longest=self.longest,
        )

    def open(self, run: Run) -> Forward:
        """Returns a forward pass over a new store; with several ranks, rank 0 leads the others."""
        from pyvmem.attention.reads import EXACT, Reads
        from vmem_bench.serving.forward import Forward, Kernels
        from vmem_bench.serving.ranks import LeadingForward, Told

        arm = self.arm(run.name)
        reads = Reads(tile=_TILE) if self._tiles(arm) else EXACT
        store = self._store(arm, run.slots, run.limit, run.budget)
        self._stores.append(store)
        kernels = Kernels(arm.prefill, arm.decode, reads, arm.library)
        graphs = self.gpu and not self.command.args.eager
        rest = (kernels, max(run.budget, store.slots), graphs)
        if self.group is None or self.group.rank:
            return Forward(self.model, store, *rest)
        return LeadingForward(self.model, Told(store, self.group), *rest)

    def sweep(self) -> None:
        """Closes the stores after a run.

        After an error in `serve`, the traceback's frames would otherwise keep the tensors alive.
        """
        import torch

        gc.collect()
        while self._stores:
            self._stores[-1].close()
            self._stores.pop()
        if self.gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def logits(self, name: str, requests: Sequence[Request]) -> dict[tuple[int, int], Any]:
        """Serves `requests` and returns the logits, keyed by request and number of rows."""
        found: dict[tuple[int, int], Any] = {}

        def keep(lives: Any, logits: Any) -> None:
            for live, row in zip(lives, logits.float().cpu(), strict=True):
                found[live.number, live.rows] = row

        arrivals = [Arrival(0.0, request) for request in requests]
        room = 2 * self.longest * self.model.sizes.token_bytes  # enough for two slots of `static`
        few = {"slots": min(self.command.args.slots, _FEW), "limit": min(self.limit, room)}
        self.serve(name, arrivals, budget=self.command.args.check_budget, observer=keep, **few)
        return found


def _tokens(sizes: Sizes, number: int, arrival: Arrival) -> Ints:
    """Returns a request's tokens.

    They are the same in every arm, and each content id determines a block of the prompt's tokens.
    """
    import numpy as np

    def drawn(seed: tuple[int, ...], count: int) -> Ints:
        tokens = np.random.default_rng(seed).integers(sizes.vocabulary, size=count)
        return tokens.astype(np.int32)

    context, output = arrival.request
    blocks = [drawn((1, one), _CONTENT) for one in arrival.content]
    prompt = np.concatenate(blocks)[:context] if blocks else drawn((2, number), context)
    return np.concatenate((prompt, drawn((3, number), context + output - len(prompt))))


def _check(runner: _Runner, part: Part, names: Sequence[str]) -> list[str]:
    """Compares each arm's logits with the first's; returns the arms that differ by too much."""
    wrong: list[str] = []
    requests = [Request(37, 6), Request(300, 4), Request(610, 5), Request(5, 9)]
    requests = [one for one in requests if one.longest <= runner.longest]
    wanted = _attempt(runner, part, names[0], partial(runner.logits, names[0], requests))
    if wanted is None:
        return wrong
    for name in names[1:]:
        if runner.arm(name).kind == VLLM or runner.arm(name) == runner.arm(names[0]):
            continue
        found = _attempt(runner, part, name, partial(runner.logits, name, requests))
        if found is None:
            continue
        both = sorted(wanted.keys() & found.keys())
        answers = sum(one.output for one in requests)
        worst = max(
            float((wanted[key] - found[key]).abs().max() / wanted[key].abs().max()) for key in both
        )
        part.value(
            f"difference/{name}",
            f"{runner.arm(name).what}: largest difference of a logit, relative to the row",
            name,
            worst,
            "x",
            compared=len(both),
        )
        if len(both) < answers or not worst <= _BOUND:  # also catches NaN
            wrong.append(name)
            part.not_run(f"makespan/{name}", f"{len(both)} of {answers} rows, {worst:.3g} apart")
            runner.command.show(f"{name}: {part.missing[-1]['why']}")
    return wrong


def _attempt(runner: _Runner, part: Part, name: str, work: Callable[[], Any]) -> Any:
    """Returns the result of `work`, or None if the arm failed, so that other arms can continue."""
    why = ""
    try:
        return work()
    except (VMemError, RuntimeError, ValueError, ImportError, AssertionError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        part.not_run(f"makespan/{name}", why)
        runner.command.show(f"{name}: {why}")
    finally:
        runner.sweep()
    return None


def _workload(args: argparse.Namespace, longest: int, shrink: int) -> list[Arrival]:
    """Returns the requests that fit in a slot, with arrival times; `shrink` divides the lengths."""
    if args.workload == "chat":
        made = generate(args.requests, args.seed)
        prompts, answers = (
            mean / statistics.fmean(one[place] for one in made) for place, mean in enumerate(_CHAT)
        )
        requests = [Request(int(c * prompts) + 1, int(o * answers) + 1) for c, o in made]
        arrivals = poisson(requests, args.rate, args.seed)
    elif args.trace is not None:
        arrivals = read_arrivals(args.trace)
    elif args.workload == "prefixes":
        arrivals = _conversations(args)
    else:
        arrivals = poisson(generate(args.requests, args.seed), args.rate, args.seed)
    if args.workload != "prefixes":
        arrivals = [
            Arrival(at, Request(-(-context // shrink), -(-output // shrink)))
            for at, (context, output), _ in arrivals
        ]
    arrivals = [one for one in arrivals if one.request.longest <= longest]
    arrivals = arrivals[args.skip : args.skip + args.requests]
    if args.workload == "offline":
        return [Arrival(0.0, one.request) for one in arrivals]
    if args.workload == "online":
        return poisson([one.request for one in arrivals], args.rate, args.seed)
    first = arrivals[0].at if arrivals else 0.0
    return [one._replace(at=(one.at - first) / args.speed_up) for one in arrivals]


def _conversations(args: argparse.Namespace) -> list[Arrival]:
    """Returns synthetic conversations of 4 prompts each, `_TALKS` of them interleaved.

    Each prompt is 128 tokens longer than the conversation's previous prompt.
    """
    arrivals = []
    for number, one in enumerate(poisson([Request(1, 32)] * args.requests, args.rate, args.seed)):
        turn, talk = divmod(number % (4 * _TALKS), _TALKS)
        content = (_TALKS * (number // (4 * _TALKS)) + talk,)
        request = one.request._replace(context=_CONTENT // 4 * (turn + 1) - 1)
        arrivals.append(one._replace(request=request, content=content))
    return arrivals


def _measure(command: Command, part: Part, device: torch.device) -> None:
    import torch

    from vmem_bench.decoder import LLAMA_3_8B, TINY, YI_6B, YI_34B, Decoder, Shard
    from vmem_bench.serving import ranks

    args = command.args
    tiny = command.quick or device.type == "cpu"
    shapes = {one.name: one for one in (LLAMA_3_8B, YI_6B, YI_34B)}
    sizes = TINY if tiny else shapes[args.model]
    if tiny:
        args.slots, args.budget, args.check_budget = min(args.slots, 8), 256, 128
        args.requests, args.rounds = min(args.requests, 6), 1
    longest = 1024 if tiny else args.longest
    limit = args.limit
    if tiny:
        limit = (2 if device.type == "cpu" else 64) << 20
    arrivals = _workload(args, longest, max(32, args.longest // longest) if tiny else 1)
    if not arrivals:
        part.not_run("*", f"no request of at most {longest} tokens")
        return
    command.show(f"{sizes.name}, {len(arrivals)} requests: {WORKLOADS[args.workload]}")
    group = ranks.Group(device) if ranks.count() > 1 else None
    shard = Shard(group.rank, group.size, group.sum) if group is not None else Shard()
    model = Decoder(sizes, device, longest=longest, shard=shard)
    if not limit:
        limit = int(torch.cuda.mem_get_info(device)[0]) - _SPARE
    command.record.options.update(
        model=sizes.name, kv_bytes=limit, longest=longest, served=len(arrivals)
    )
    command.record.options["ranks"] = shard.ranks
    runner = _Runner(command, model, longest, limit, device, group)
    if group is None:
        _compare(command, part, runner, arrivals)
        return
    try:
        if group.rank:
            ranks.follow(group, runner.open, runner.sweep)
        else:
            _compare(command, part, runner, arrivals)
            group.tell(None)
    finally:
        group.close()


def _compare(command: Command, part: Part, runner: _Runner, arrivals: Sequence[Arrival]) -> None:
    """Compares the arms' logits, then runs the arms in turn and adds their rows."""
    args = command.args
    names: list[str] = args.arms
    wrong: list[str] = []
    if not args.no_check:
        wrong = _check(runner, part, names)
        command.write()
    kept = (list(part.rows), list(part.missing))
    runs: dict[str, list[Outcome]] = {name: [] for name in names}
    broken = {item["id"].rpartition("/")[2] for item in part.missing}
    slowest = 0.0
    planned, done = args.rounds * (len(names) - len(broken & set(names))), 0
    for number in range(args.rounds):
        if number and not command.deadline.allows(slowest):
            part.notes.append(f"the deadline passed after {number} rounds")
            break
        began = command.deadline.used
        for k in range(len(names)):
            name = names[(number + k) % len(names)]
            left = min(args.limit_s, command.deadline.left)
            if name in broken or left <= 0:
                continue
            serve = partial(runner.serve, name, arrivals, budget=args.budget, limit_s=left)
            outcome = _attempt(runner, part, name, serve)
            if outcome is None:
                broken.add(name)
                kept = (kept[0], list(part.missing))
                continue
            runs[name].append(outcome)
            rate, done = figures(outcome)["tokens"][1], done + 1
            speed = f"{name}: {outcome.seconds:.1f} s, {rate:,.0f} tokens/s"
            command.show(f"{speed}; {done} of {planned} runs")
            part.rows[:], part.missing[:] = kept[0], list(kept[1])
            for one, outcomes in runs.items():
                add_rows(part, one, runner.words(one), outcomes)
            command.write()
        slowest = max(slowest, command.deadline.used - began)
    for name, outcomes in runs.items():
        if not outcomes and name not in broken:
            part.not_run(f"makespan/{name}", "the deadline passed first")
    add_aims(command.aims, part, {name: runner.words(name) for name in names}, args.limit)
    if wrong:
        raise WrongResult(f"{', '.join(wrong)}: the logits differ from those of {names[0]}")


def _arms(text: str) -> list[str]:
    names = text.split(",")
    known = [*ARMS, AGAIN]
    if not set(names) <= set(known) or len(set(names)) != len(names) or names[0] == AGAIN:
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(known)}")
    return names


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that affect a run's results."""
    names = (
        "arms workload skip seed rate speed_up limit slots group budget ahead rounds limit_s eager"
    )
    found = {name: getattr(args, name) for name in names.split()}
    if args.page:
        found["page"] = args.page
    return {**found, "trace": args.trace.name if args.trace else None}


def add_parser(which: Any) -> None:
    """Adds ``serve`` to the benchmarks."""
    parser = which.add_parser(
        "serve",
        help="serves requests end to end, with caches that take turns",
        description="Serves a workload with random weights in a real model's shape. The arms "
        "differ only in the cache: contiguous slots, paged blocks, static slots.",
    )
    add_common(parser, 480)
    add = parser.add_argument
    add("--arms", type=_arms, default=_arms(f"contiguous,{AGAIN},paged16,paged128,fa3,2M,static"))
    add(
        "--workload",
        choices=list(WORKLOADS),
        default="azure",
        help="kind of requests and arrivals (azure)",
    )
    add(
        "--trace",
        type=existing_file,
        metavar="FILE",
        help="Azure's or vAttention's CSV, Mooncake's JSONL",
    )
    add("--requests", type=int, default=400, help="number of requests (400)")
    add("--skip", type=int, default=0, help="requests of the trace to skip (0)")
    add("--seed", type=int, default=1, help="seed of a synthetic workload (1)")
    add("--rate", type=float, default=5.5, help="Poisson arrivals a second (5.5)")
    add("--speed-up", type=float, default=1.0, help="divide a trace's arrival times by this (1)")
    add(
        "--model",
        choices=["Llama-3-8B", "Yi-6B", "Yi-34B"],
        default="Llama-3-8B",
        help="model's shape (Llama-3-8B)",
    )
    add(
        "--limit", type=size, default=0, help="bytes for keys and values, such as 20G (free memory)"
    )
    add("--longest", type=int, default=16384, help="tokens of a slot (16384)")
    add("--slots", type=int, default=256, help="maximum concurrent requests (256)")
    add("--group", type=int, default=1, help="layers in one tensor of a contiguous cache (1)")
    text = "page size of a contiguous cache, such as 128K (the back end's)"
    add("--page", type=size, default=0, metavar="SIZE", help=text)
    add("--budget", type=int, default=2048, help="maximum new tokens per step (2048)")
    add("--check-budget", type=int, default=512, help=argparse.SUPPRESS)
    add("--ahead", type=int, default=4, help="tokens that a cache prepares ahead (4)")
    add("--rounds", type=int, default=2, help="runs of each arm (2)")
    add(
        "--limit-s", type=float, default=240.0, metavar="S", help="time limit of an arm's run (240)"
    )
    add("--eager", action="store_true", help="no CUDA graphs")
    merge = {"type": existing_file, "nargs": "+", "metavar": "FILE"}
    add("--merge", **merge, help="measure nothing: merge results of several runs")
    add("--no-check", action="store_true", help="do not compare the arms' logits first")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0 on success, 1 on failure, 2 for bad usage or an unusable back end, or 3 if nothing was
    measured.
    """
    if args.merge is not None:
        return put_together(join, args)
    if args.workload == "chat" and args.trace is not None:
        text = f"--workload chat generates its own requests: omit --trace {args.trace}"
        print(f"vmem bench: {text}", file=sys.stderr)
        return 2
    if rank := int(os.environ.get("RANK", "0")):  # set by torchrun; only rank 0 writes results
        args.out, args.json = None, False
    args.device = int(os.environ.get("LOCAL_RANK", args.device)) if rank else args.device
    command = open_command(args, "serve", _METHOD, **_options(args))
    title = WORKLOADS[args.workload]
    return run_on_device(command, args.workload, title, _measure, follows=rank > 0)
