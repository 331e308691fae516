# SPDX-License-Identifier: MIT
"""`vmem bench overlap`: the time that mapping in the background adds to decode iterations.

Follows figure 9 of the vAttention paper (ASPLOS'25). One process decodes with one model over three
caches, one per mode. They take turns in blocks of iterations, with the same lengths and tokens:

- ``mapped``: all pages were mapped beforehand; the cache is not called while the model runs.
- ``async``: calls `step_async` for the next iteration as soon as the first layers of this one are
  launched, then `step`.
- ``sync``: calls only `step`, on the critical path.

Requests grow from `low` to `high` tokens. A request that reaches `high` is replaced by a new one of
`low` tokens, whose rows are not written, since prefill is not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Part
from pyvmem.bench.timing import quiet
from pyvmem.layouts.options import count
from vmem_bench.command import (
    Command,
    WrongResult,
    add_common,
    add_page,
    open_command,
    run_on_device,
)
from vmem_bench.overlap_modes import MODES, SPIKE, Lengths, Mode

if TYPE_CHECKING:
    import torch

    from vmem_bench.decoder import Sizes

__all__ = ["add_parser", "run"]

_SPARE = 6 << 30  # bytes left free for activations and libraries
_METHOD = {
    "time": "host clock around step, forward, step_async and synchronize",
    "gpu": "events around the forward pass",
    "blocks": "the modes take turns in blocks of iterations; a block is a round",
    "spikes": f"iterations of more than {SPIKE} times the mode's own median",
}


def _compare(modes: list[Mode], lengths: Lengths, iteration: int) -> float:
    """Returns the largest difference between two modes' outputs in one iteration.

    It is relative to the largest element. Replacement requests, whose first `low` rows were never
    written, are compared only between ``async`` and ``sync``, where these rows are zeros.
    """
    outs = {mode.name: mode.out.float() for mode in modes if mode.out is not None}
    worst = 0.0
    for one, other in (("async", "sync"), ("async", "mapped")):
        if one not in outs or other not in outs:
            continue
        late = lengths.replaced(iteration)
        rows = [i for i, gone in enumerate(late) if not gone or other == "sync"]
        if rows:
            a, b = outs[one][rows], outs[other][rows]
            if not bool(a.isfinite().all()):
                raise WrongResult(f"iteration {iteration}: the output of {one} is not finite")
            worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def _fitting(batch: int, sizes: Sizes, high: int, free: int, modes: int) -> int:
    """Returns how many requests, up to `batch`, fit beside the weights if all caches are full."""
    each = modes * high * sizes.token_bytes
    return max(0, min(batch, (free - 2 * sizes.weights - _SPARE) // each))


def _measure(command: Command, part: Part, device: torch.device) -> None:
    import torch

    from vmem_bench.decoder import LLAMA_3_8B, TINY, Decoder

    args = command.args
    sizes = TINY if command.quick or device.type == "cpu" else LLAMA_3_8B
    low, high = (64, 640) if command.quick else (args.low, args.high)
    batch = min(args.batch, 4) if command.quick else args.batch
    iterations = min(args.iterations, 90) if command.quick else args.iterations
    block = min(args.block, 20) if command.quick else args.block
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        fits = _fitting(batch, sizes, high, free, len(args.modes))
        if fits < 1:
            part.not_run("*", f"{free >> 30} GiB are free, which is too little for the model")
            return
        if fits < batch:
            part.notes.append(f"{fits} requests, since {batch} do not fit {free >> 30} GiB")
            batch = fits
    lengths = Lengths(batch, low, high)
    command.record.options.update(model=sizes.name, batch=batch, low=low, high=high, block=block)
    command.show(f"{sizes.name}, {batch} requests of {low} to {high} tokens")
    model = Decoder(sizes, device)
    with ExitStack() as stack:
        # Create all caches before any of them maps a page, while enough memory for their limits is
        # still free.
        modes = [
            stack.enter_context(Mode(name, command, model, lengths, batch)) for name in args.modes
        ]
        for mode in modes:
            mode.prepare()
            command.show(f"{mode.name}: {MODES[mode.name]}")
        part.notes.append(str(modes[0].attend.choice))
        _turns(command, part, modes, lengths, iterations, block)
    _add_aims(command, batch, iterations)


def _turns(
    command: Command,
    part: Part,
    modes: list[Mode],
    lengths: Lengths,
    iterations: int,
    block: int,
) -> None:
    """Runs the blocks of iterations and writes the rows after every fifth block.

    The modes take turns in each block, in rotating order.
    """
    import torch

    device, vocabulary = modes[0].device, modes[0].model.sizes.vocabulary
    batch = len(lengths.at(0))
    ids = torch.randint(
        vocabulary, (iterations + block, batch), generator=torch.Generator().manual_seed(3)
    ).to(device)
    for mode in modes:
        mode.times.new_round()
    difference, slowest = 0.0, 0.0
    warm_up = min(block, 20)

    def turn(mode: Mode, first: int, last: int, keep: bool) -> None:
        for iteration in range(first, last):
            mode.iterate(iteration, ids[iteration], keep=keep)

    def fill() -> None:
        part.rows.clear()
        for mode in modes:
            mode.add_rows(part)
        part.value(
            "difference",
            "largest difference between the modes' outputs, relative to the largest output",
            "all",
            difference,
            "x",
        )
        command.write()

    with quiet():
        for mode in modes:
            turn(mode, 0, warm_up, False)
        why = [mode.capture() for mode in modes]
        part.notes.append(f"no CUDA graph: {why[0]}" if any(why) else "forward in CUDA graphs")
        last = warm_up
        for number, first in enumerate(range(warm_up, warm_up + iterations, block)):
            if number and not command.deadline.allows(slowest):
                part.notes.append(f"the deadline passed after {first - warm_up} iterations")
                break
            began, last = time.monotonic(), min(first + block, warm_up + iterations)
            for k in range(len(modes)):
                mode = modes[(number + k) % len(modes)]
                if number:
                    mode.times.new_round()
                turn(mode, first, last, True)
            slowest = max(slowest, time.monotonic() - began)
            difference = max(difference, _compare(modes, lengths, last - 1))
            if number % 5 == 4:
                fill()
                command.show(f"{last - warm_up} iterations")
    fill()
    for mode in modes:
        mode.cache.check_integrity()
    if difference > 0.02:
        raise WrongResult(f"the modes' outputs differ by {difference:.2g}")


def _add_aims(command: Command, batch: int, iterations: int) -> None:
    aims = command.aims
    found = command.record.row("iterations/time/async")
    done = int(found["n"]) if found else 0
    aims.applies = aims.applies and batch >= 32 and done >= iterations >= 2500

    def p99(a: Any, b: Any) -> float:
        return float(a["p99"]) / float(b["p99"])

    def more(a: Any, b: Any) -> float:
        return float(a["value"]) - float(b["value"])

    pairs: list[tuple[str, str, Callable[[Any, Any], float], str, float]] = [
        ("p99", "99th percentile of iterations", p99, "x", 1.03),
        ("spikes", "additional iterations above 1.2 times the median", more, "count", 1.0),
    ]
    for row, what, value, unit, goal in pairs:
        kind = "time" if row == "p99" else row
        for mode in ("async", "sync"):
            wanted = mode == "async"
            words = f"compared with {MODES['mapped']}"
            aims.add(
                f"{row}_{mode}",
                f"{MODES[mode]}: {what}, {words}",
                [f"iterations/{kind}/{mode}", f"iterations/{kind}/mapped"],
                value,
                unit=unit,
                op="<=" if wanted else None,
                aim=goal if wanted else None,
            )


def _modes(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(MODES) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(MODES)}")
    return names


def add_parser(which: Any) -> None:
    """Adds ``overlap`` to the benchmarks."""
    parser = which.add_parser(
        "overlap",
        help="decode iterations with memory mapped beforehand, in the background or synchronously",
        description="Decodes with random weights of Llama-3-8B's shape with three caches in "
        "turn, and compares their iterations. Full size needs a GPU with 120 GB.",
    )
    add_common(parser, 180)
    add_page(parser)
    add = parser.add_argument
    add("--batch", type=count, default=32, help="requests (32)")
    add("--low", type=count, default=4096, help="tokens of a new request (4096)")
    add("--high", type=count, default=8192, help="tokens at which a request ends (8192)")
    add("--iterations", type=count, default=2500, help="iterations of each mode (2500)")
    add("--block", type=count, default=100, help="iterations before the next mode's turn (100)")
    add("--ahead", type=int, default=16, help="tokens to map ahead (16)")
    add("--kernel", default="auto", help="kernel of pyvmem.attention (auto)")
    add("--modes", type=_modes, default=list(MODES), help=",".join(MODES))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.
    """
    command = open_command(args, "overlap", _METHOD)
    return run_on_device(command, "iterations", "iterations of decoding", _measure)
