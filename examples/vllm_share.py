# SPDX-License-Identifier: MIT
"""Two vLLM engines that share memory: they take turns, and the memory of one goes to the other.

    python examples/vllm_share.py MODEL [--capacity 128M] [--requests 20]

Each engine is a separate process, as two servers would be. While one answers a burst of requests,
the other is idle; the table is that of `vmem top`. Exits with an error unless an engine held more
than half of the memory, its share under a fixed split. Run it with a Python that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyvmem.commands.terminal import columns, has_colour
from pyvmem.commands.top import read
from pyvmem.commands.top_table import drawn
from pyvmem.layouts.options import count, size
from pyvmem.plumbing.units import format_bytes

NAMES = ("left", "right")
QUESTIONS = ("Why is the sky blue?", "Give me one tip for better sleep.", "What is a whale?")
TOKENS = 48
READY = "ready"


def serve(model: str, requests: int) -> None:
    """Runs an engine that answers a burst of requests for each line on standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps vLLM's log out of the answers
    import torch
    from vllm import LLM, SamplingParams

    # vLLM's 16-bit kernels need instructions that not every processor has.
    precision = "auto" if torch.cuda.is_available() else "float32"
    options = {"max_model_len": 512, "enforce_eager": True, "dtype": precision}
    llm = LLM(model, max_num_seqs=requests, enable_prefix_caching=False, **options)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
    print(json.dumps(READY), file=answers, flush=True)
    template = llm.get_tokenizer().chat_template
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(requests)]
    for _ in sys.stdin:
        start = time.monotonic()
        if template:
            chats = [[{"role": "user", "content": one}] for one in asked]
            done = llm.chat(chats, sampling, use_tqdm=False)
        else:
            done = llm.generate(asked, sampling, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in done)
        text = " ".join(done[0].outputs[0].text.split())
        answer = {"asked": asked[0], "text": text, "tokens": tokens}
        print(json.dumps(answer | {"seconds": time.monotonic() - start}), file=answers, flush=True)


@dataclass
class Engine:
    """A process that runs `serve`."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def answer(self) -> object:
        """Returns the next line that the process prints, parsed as JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has exited:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def burst(self) -> threading.Thread:
        """Starts a burst; the returned thread ends when the answer has arrived."""
        assert self.process.stdin is not None
        self.process.stdin.write("burst\n")
        self.process.stdin.flush()
        thread = threading.Thread(target=self._report, daemon=True)
        thread.start()
        return thread

    def _report(self) -> None:
        self.said = self.answer()


@contextmanager
def engine(name: str, args: argparse.Namespace, folder: Path) -> Iterator[Engine]:
    """Starts an engine, and terminates it on exit."""
    settings = {
        "VMEM_VLLM": "1",
        "VMEM_NAME": name,
        "VMEM_LEDGER": str(folder),
        "VMEM_CAPACITY": str(args.capacity),
        "VMEM_RESERVE": str(args.capacity // 24),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, __file__, args.model, "--serve", "--requests", str(args.requests)]
    log = folder / f"{name}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            words,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Engine(name, process, log)
        finally:
            process.terminate()


def main() -> int:
    """Starts both engines, lets them take turns, and prints how much memory each held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory, or a name that vLLM knows")
    parser.add_argument("--capacity", type=size, default=128 << 20, help="memory of both (128M)")
    parser.add_argument("--requests", type=count, default=20, help="requests in a burst (20)")
    parser.add_argument("--turns", type=count, default=2, help="number of bursts (2)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.requests)
        return 0
    most = dict.fromkeys(NAMES, 0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vmem-share-")))
        print(f"two engines, {format_bytes(args.capacity)} for both; loading", flush=True)
        engines = [stack.enter_context(engine(name, args, folder)) for name in NAMES]
        for one in engines:
            one.answer()
        for turn in range(args.turns):
            one = engines[turn % len(engines)]
            print(f"\n{one.name} answers {args.requests} requests", flush=True)
            thread, shown, last = one.burst(), 0.0, ""
            while thread.is_alive():
                thread.join(0.1)
                reading = read(folder)
                for device in reading.values():
                    for row in device.engines:
                        most[row["engine"]] = max(most[row["engine"]], row["mapped"])
                table = drawn(reading, columns(), has_colour())
                if table != last and time.monotonic() - shown >= 2:
                    shown, last = time.monotonic(), table
                    print(table, flush=True)
            said = one.said
            assert isinstance(said, dict)
            rate = said["tokens"] / said["seconds"]
            print(f"{one.name}: {said['tokens']} tokens, {rate:.0f} a second, such as")
            print(f"  {said['asked']}\n  -> {said['text']}", flush=True)
    half = args.capacity // 2
    print(f"\na fixed split would have given each {format_bytes(half)}; they had at most")
    for name, peak in most.items():
        print(f"  {name:<6} {format_bytes(peak)}")
    return 0 if max(most.values()) > half else 1


if __name__ == "__main__":  # vLLM may start processes that import this file
    sys.exit(main())
