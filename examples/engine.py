# SPDX-License-Identifier: MIT
"""A serving engine in a file: continuous batching, prefixes, preemption and streaming.

    python examples/engine.py "Why is the sky blue?" "Name three colours."

By default, it serves the model that `make run` uses; this needs the extra ``serve``. The model is
converted once; a copy that `make run` left under build/cache is reused. --model names a different
model: a directory or a GGUF file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from pyvmem import KVCache
from pyvmem.attention import Attention, Batch
from pyvmem.engine import Model, Policy, Request, RequestCache, Shortage
from pyvmem.hf.shapes import plain_rows, plain_scores
from pyvmem.layouts.options import count
from pyvmem.serve.model import ModelNotFound, encode, load


@dataclass(eq=False)
class Job:
    """A prompt that is being served.

    `tokens` holds the prompt and the answer so far; `left` tokens remain to be generated.
    """

    tokens: list[int]
    left: int
    preemptions: int = 0
    failed: Shortage | None = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    kernel: Attention,
    batch: Batch,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the new keys and values and computes attention; transformers calls it for each layer.

    The tensors have shape ``[1, heads, tokens, dim]``.
    """
    plain_scores("engine", others)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    kernel.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), batch)
    return kernel(query[0].transpose(0, 1), layer, batch, scale=scaling).unsqueeze(0), None


class Engine:
    """Decodes many prompts at once, greedily.

    It is a context manager that releases its requests on exit; the caller closes the cache.
    """

    def __init__(self, model: Any, cache: RequestCache, eos: frozenset[int] = frozenset()) -> None:
        assert isinstance(cache.cache, KVCache), "this engine runs on one rank"
        plain_rows(model.config.get_text_config(), "this engine")
        if not model.is_backend_compatible():
            name = type(model).__name__
            raise TypeError(f"{name} computes attention itself: it ignores AttentionInterface")
        AttentionInterface.register("engine", attend)
        model.set_attn_implementation("engine")
        self.model, self.eos = model, eos
        self.cache, self.kernel = cache, Attention(cache.cache)
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, Request] = {}  # in order of admission
        self.preempted = False  # if true, admit nothing until a job ends

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        while self.running:
            self.cache.release(self.running.popitem()[1])
        self.kernel.close()

    def submit(self, prompt: Sequence[int], answer: int) -> Job:
        """Queues a prompt for at most `answer` new tokens, or fewer if the slot is too short."""
        left = min(answer, self.cache.max_seq_len - len(prompt) + 1)
        if not prompt or left < 1:
            longest = self.cache.max_seq_len
            text = f"a prompt of {len(prompt)} tokens and {answer} new ones; a slot holds {longest}"
            raise ValueError(text)
        self.waiting.append(Job(list(prompt), left))
        return self.waiting[-1]

    def run(self) -> Iterator[tuple[Job, int]]:
        """Yields tokens until all jobs are finished; sets `failed` on a job that does not fit."""
        while self.waiting or self.running:
            self.admit()
            held = {job: request.length for job, request in self.running.items()}
            while short := self.cache.extend(self.lengths()):
                self.preempt(short)
            if self.running:
                yield from self.compute([job.tokens[held[job] :] for job in self.running])

    def lengths(self, more: int = 0) -> dict[Request, int]:
        """Returns the length that each running request needs, plus `more`, up to the slot size."""
        longest = self.cache.max_seq_len
        return {one: min(len(job.tokens) + more, longest) for job, one in self.running.items()}

    def admit(self) -> None:
        """Admits jobs while slots and memory last, reusing cached prefixes."""
        while self.waiting and not (self.preempted and self.running):
            found = self.cache.admit(self.waiting[0].tokens)
            if isinstance(found, Request):
                self.running[self.waiting.popleft()] = found
            elif found.never or not self.running:
                self.waiting.popleft().failed = found
            else:
                return

    def preempt(self, short: Shortage) -> None:
        """Preempts the newest job; its prefix may still be cached when it is admitted again."""
        job, request = self.running.popitem()
        self.cache.release(request, tokens=job.tokens)
        if short.never or not self.running:
            job.failed = short
        else:
            job.preemptions += 1
            self.preempted = True
            self.waiting.appendleft(job)

    @torch.inference_mode()
    def compute(self, news: list[list[int]]) -> list[tuple[Job, int]]:
        """Runs the model once over the new tokens of all running jobs, joined into one sequence."""
        slots = [request.slot for request in self.running.values()]
        counts = [len(one) for one in news]
        batch = self.kernel.batch(slots, counts, list(self.lengths().values()))
        self.cache.prepare(self.lengths(1))  # maps pages while the model runs
        device = self.model.device
        output = self.model(
            input_ids=torch.tensor([[token for one in news for token in one]], device=device),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(counts, device=device).cumsum(0) - 1,
            kernel=self.kernel,
            batch=batch,
        )
        chosen = output.logits[0].float().argmax(dim=-1).tolist()
        found = list(zip(self.running, chosen, strict=True))
        for job, token in found:
            job.tokens.append(token)
            job.left -= 1
            if token in self.eos or not job.left:  # the cache keeps its rows for the next turn
                self.cache.release(self.running.pop(job), tokens=job.tokens)
                self.preempted = False
        return found


def main() -> None:
    """Serves the prompts from the command line and prints tokens as they are generated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", help="a model's directory or GGUF file")
    parser.add_argument("--tokens", type=count, default=40, help="most tokens of an answer (40)")
    parser.add_argument("--memory", type=count, default=256, help="MiB of keys and values (256)")
    args = parser.parse_args()
    if "" in map(str.strip, args.prompts):
        parser.error("argument prompts: an empty prompt has no answer")
    converted = Path(__file__).resolve().parents[1] / "build" / "cache"  # where `make run` puts it
    if converted.is_dir():
        os.environ.setdefault("VMEM_CACHE_DIR", str(converted))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded = load(args.model, device=device, notify=lambda text: print(text, file=sys.stderr))
    except ModelNotFound as error:
        parser.error(f"argument --model: {error}")
    shape = Model.of(loaded.model.config, "float32")
    policy = Policy(max_seq_len=2048, memory=args.memory << 20)
    with (
        RequestCache.open(shape, policy) as cache,
        Engine(loaded.model, cache, loaded.eos_token_ids) as engine,
    ):
        encoded = [encode(loaded.tokenizer, text) for text in args.prompts]
        try:
            jobs = [engine.submit(prompt, args.tokens) for prompt in encoded]
        except ValueError as error:
            parser.error(f"argument prompts: {error}")
        for job, token in engine.run():
            print(f"{jobs.index(job)}: {loaded.tokenizer.decode([token])!r}", flush=True)
    for number, job in enumerate(jobs):
        if job.failed:
            short = f"needs {job.failed.largest:,} bytes, the cache has {job.failed.limit:,}"
            if not job.failed.never:
                short = f"short of {job.failed.what}: other requests hold it"
            print(f"{number}: {len(job.tokens)} tokens: {short}", file=sys.stderr)
    sys.exit(any(job.failed for job in jobs))


if __name__ == "__main__":
    main()
