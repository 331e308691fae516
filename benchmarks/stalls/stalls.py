#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Which map call stalls, when, and in which pattern of growth. See README.md beside this file.

    python benchmarks/stalls/stalls.py --out benchmarks/results/stalls.json

Each pattern runs in a process of its own under slow_calls.c, which is compiled first. What a
pattern maps is one physical run again and again, so that it costs addresses and the driver's
handles, no memory; `pool` alone takes pages as a cache does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KB, MB = 1 << 10, 1 << 20
PAGE = 64 * KB
_MAP_REQUEST = 33  # UVM_MAP_EXTERNAL_ALLOCATION


@dataclass(frozen=True)
class Pattern:
    """One way to make mappings.

    Attributes:
        what: in words.
        run: bytes of a mapping.
        stride: bytes between two; 0: `run`, each touches the one before.
        calls: the part of ``--calls`` that is made.
        pool: pages of their own instead of one run for all.
        pinned: the process stays on one CPU.
        beside: another process has an idle CUDA context and a mapping.
        again: everything is unmapped, and mapped a second time.
        each_cpu: the process moves to another CPU after every 4096 calls.
    """

    what: str
    run: int = PAGE
    stride: int = 0
    calls: float = 1.0
    pool: bool = False
    pinned: bool = False
    beside: bool = False
    again: bool = False
    each_cpu: bool = False


PATTERNS = {
    "pages": Pattern("page by page, neighbours"),
    "pages2": Pattern("the same once more: at the same counts?"),
    "holes": Pattern("page by page, a hole behind each", stride=2 * PAGE),
    "tables": Pattern("a page in each 2 MiB: a page table for each", stride=2 * MB, calls=0.5),
    "runs": Pattern("runs of 8 pages", run=8 * PAGE),
    "huge": Pattern("runs of 2 MiB, aligned", run=2 * MB, calls=0.5),
    "pinned": Pattern("page by page, on one CPU", pinned=True),
    "moving": Pattern("page by page, from all CPUs in turns", each_cpu=True),
    "beside": Pattern("page by page, an idle context beside", beside=True),
    "again": Pattern("page by page, unmapped and mapped again", again=True, calls=0.5),
    "pool": Pattern("page by page, each a page of its own", pool=True, calls=0.5),
}


# ---- the child: makes the mappings ---------------------------------------------------------------


def make_mappings(pattern: Pattern, calls: int, backend: str, device: int) -> None:
    """Prints what it did as a line of JSON."""
    import pyvmem

    cpus = sorted(os.sched_getaffinity(0))
    if pattern.pinned:
        os.sched_setaffinity(0, {cpus[-1]})
    step = pattern.stride or pattern.run
    limit = {"stock": 475_136}.get(backend, 0)
    with pyvmem.Context(
        backend, device=device, granule=PAGE, max_mappings=limit, pool_high=pyvmem.KEEP_ALL
    ) as context:
        reservation = context.reserve(calls * step, visible=False, align=2 * MB)
        base, clock = reservation.addr, time.monotonic
        ops = pyvmem.OpBatch(1)
        pages = None if pattern.pool else context.create(pattern.run, page_size=_page(pattern))
        if pattern.pool:
            context.warm(calls * pattern.run)
        began = clock()
        made = 0
        worst = 0.0
        for turn in range(2 if pattern.again else 1):
            if turn:
                context.unmap(base, calls * step)
            for number in range(calls):
                if pattern.each_cpu and number % 4096 == 0:
                    os.sched_setaffinity(0, {cpus[number // 4096 % len(cpus)]})
                at = base + number * step
                start = clock()
                if pages is not None:
                    context.map(at, pattern.run, pages)
                else:
                    ops.clear()
                    ops.populate(at, pattern.run, 1, 0, PAGE, True)
                    context.batch(ops)
                worst = max(worst, clock() - start)
                made += 1
        grown = clock()
        stats = context.stats()
        if pages is not None:
            pages.drop()
        with contextlib.suppress(pyvmem.VMemError):
            reservation.close(unmap=True)
        print(
            json.dumps(
                {
                    "calls": made,
                    "mappings": stats.mappings,
                    "seconds": grown - began,
                    "teardown_seconds": clock() - grown,
                    "worst_ms": 1e3 * worst,
                    "driver_ns": stats.driver_ns,
                }
            ),
            flush=True,
        )


def _page(pattern: Pattern) -> int:
    return 2 * MB if pattern.run == 2 * MB else PAGE


def sit_idle(backend: str, device: int) -> None:
    """A context with a mapping, until standard input ends."""
    import pyvmem

    with pyvmem.Context(backend, device=device, granule=PAGE) as context:
        reservation = context.reserve(2 * MB, visible=False)
        ops = pyvmem.OpBatch(1)
        ops.populate(reservation.addr, PAGE, 1, 0, PAGE, True)
        context.batch(ops)
        print("ready", flush=True)
        sys.stdin.read()


# ---- the parent ----------------------------------------------------------------------------------


def compile_shim(folder: Path) -> Path:
    """slow_calls.c as a library."""
    library = folder / "slow_calls.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library)]
    subprocess.run([*command, str(HERE / "slow_calls.c")], check=True)
    return library


@contextlib.contextmanager
def neighbour(args: argparse.Namespace, wanted: bool) -> Iterator[None]:
    """Another process that has the device open, where one is wanted."""
    if not wanted:
        yield
        return
    command = [sys.executable, __file__, "--idle", "--backend", args.backend]
    with subprocess.Popen(
        [*command, "--device", str(args.device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


def run_pattern(name: str, args: argparse.Namespace, library: Path, folder: Path) -> dict[str, Any]:
    """One pattern: what its process printed, and what the shim saw."""
    pattern = PATTERNS[name]
    log = folder / f"{name}.jsonl"
    calls = int(args.calls * pattern.calls)
    command = [sys.executable, __file__, "--child", name, "--calls", str(calls)]
    command += ["--backend", args.backend, "--device", str(args.device)]
    shim = {"LD_PRELOAD": str(library), "SLOW_CALLS": str(log), "SLOW_MS": str(args.slow_ms)}
    with neighbour(args, pattern.beside):
        ran = subprocess.run(
            command,
            env={**os.environ, **shim},
            capture_output=True,
            text=True,
            timeout=120,
        )
    found: dict[str, Any] = {"what": pattern.what, "rc": ran.returncode}
    if ran.returncode == 0:
        found |= json.loads(ran.stdout.splitlines()[-1])
    else:
        found["error"] = ran.stderr[-800:]
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found["slow"] = [line for line in lines if "slow" in line]
    found["looks"] = seen_most([line for line in lines if "look" in line])
    found["kinds"] = [line for line in lines if "kind" in line]
    return found


def seen_most(looks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the looks at stalled threads saw, each once with how often; most often first."""
    where = Counter((look["state"], look["wchan"], look["stack"]) for look in looks)
    return [
        {"times": times, "state": state, "wchan": wchan, "stack": stack}
        for (state, wchan, stack), times in where.most_common(100)
    ]


def show(name: str, found: dict[str, Any]) -> None:
    """A pattern in a few lines."""
    if found["rc"]:
        print(f"{name:<8} failed: {found['error'].strip().splitlines()[-1:]}")
        return
    slow = [one for one in found["slow"] if one["request"] == _MAP_REQUEST]
    others = Counter(one["request"] for one in found["slow"] if one["request"] != _MAP_REQUEST)
    print(
        f"{name:<8} {found['what']}: {found['calls']:,} calls in {found['seconds']:.1f} s, torn "
        f"down in {found['teardown_seconds']:.1f} s; slow maps {len(slow)}, others {dict(others)}"
    )
    for one in slow[:12]:
        print(
            f"           map {one['number']:,}: {one['wall_ms']:.1f} ms, CPU {one['cpu_ms']:.1f}, "
            f"slept {one['slept']} times, preempted {one['preempted']}, CPUs {one['cpu']}"
        )
    for seen in found["looks"][:4]:
        print(
            f"           seen {seen['times']} times: state {seen['state']}, in "
            f"{seen['wchan'] or '?'} {seen['stack'][:160]}"
        )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--backend", default="stock")
    add("--device", type=int, default=0)
    add("--calls", type=int, default=300_000, help="of a pattern (300000)")
    add("--slow-ms", type=float, default=5.0, help="a call from so many on is logged (5)")
    add("--deadline", type=float, default=180, metavar="S", help="no pattern begins after (180)")
    add("--only", nargs="*", choices=list(PATTERNS), help="these patterns")
    add("--out", type=Path, metavar="FILE", help="write JSON here")
    add("--child", help=argparse.SUPPRESS)
    add("--idle", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.idle:
        sit_idle(args.backend, args.device)
        return 0
    if args.child:
        make_mappings(PATTERNS[args.child], args.calls, args.backend, args.device)
        return 0
    began = time.monotonic()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        library = compile_shim(folder)
        for name in args.only or PATTERNS:
            if time.monotonic() - began > args.deadline:
                print(f"{name:<8} not run: the deadline came")
                continue
            results[name] = run_pattern(name, args, library, folder)
            show(name, results[name])
            sys.stdout.flush()
            if args.out is not None:
                document = {"calls": args.calls, "slow_ms": args.slow_ms, "patterns": results}
                args.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(one["rc"] for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
