# SPDX-License-Identifier: MIT
"""Continuous batching of an unmodified transformers model over a `pyvmem.engine.RequestCache`.

Every step computes all running requests together: their new tokens (a prompt, a chunk of one, or a
single token) are concatenated into a batch ``[1, T]``, along with their positions;
`pyvmem.serve.attention` keeps the requests apart. Requests join and leave between steps; decoding
is greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pyvmem.attention import Attention
from pyvmem.engine import RequestCache
from pyvmem.errors import NotSupported
from pyvmem.hf.latent import absorbed, latent_rank
from pyvmem.kvcache import LayeredCache, LayerShape, StateShape, layer_shapes
from pyvmem.models.hf_config import NO_ATTENTION, plain_rows
from pyvmem.plumbing.closing import Closable
from pyvmem.serve import attention
from pyvmem.serve.job import Completion, FinishReason, Job, Sequence
from pyvmem.serve.scheduler import Scheduler

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache
    from pyvmem.models.shapes import Shape

__all__ = ["Engine", "EngineStats", "StepRecord", "TokenEvent"]


@dataclass(frozen=True)
class TokenEvent:
    """A new token of an answer; the last one carries the whole answer.

    Attributes:
        token: the new token; None if the request ends without one (`FinishReason.NO_MEMORY`).
    """

    request_id: int
    token: int | None
    completion: Completion | None = None


@dataclass(frozen=True)
class StepRecord:
    """A step as observers see it: after its memory is mapped, before the model runs.

    Attributes:
        step: number of the step, from 0.
        requests: each request's id, its slot, and the number of tokens in the slot in this step.
        waiting: number of requests without a slot.
    """

    step: int
    requests: tuple[tuple[int, int, int], ...]
    waiting: int


@dataclass
class EngineStats:
    """Counters and times since the engine was created.

    Attributes:
        steps: model calls.
        prompt_tokens: prompt tokens computed, including those recomputed after a preemption.
        new_tokens: tokens generated.
        preemptions, recomputed_tokens: how often a request lost its memory, and how many tokens
            were lost.
        peak_running: largest number of requests in a step.
        step_s: seconds in `Scheduler.begin` (`RequestCache.admit` and `extend`), on the critical
            path.
        ahead_s: seconds in calls of `Scheduler.look_ahead` (`admit` and `prepare`).
        model_s: seconds in the model, until the tokens have reached the CPU.
        model_steps_s: `model_s` per step; the first step of a shape also loads its kernels and,
            with FlexAttention, compiles them.
        total_s: seconds in `Engine.step`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    peak_running: int = 0
    step_s: float = 0.0
    ahead_s: float = 0.0
    model_s: float = 0.0
    model_steps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0


class Engine(Closable):
    """Serves requests with a transformers model. Usable as a context manager.

    Args:
        model: a transformers causal language model on the cache's device, in the cache's dtype. Its
            attention implementation is "vmem" until `close`, which restores the previous one.
        cache: the KV cache, with the model's number of layers. It keeps all rows, or those in the
            model's windows, and the states of layers that have one. In a model with states,
            requests with one new token run together, each in its own row of the batch; all others
            run alone. For a model with MLA it keeps the latent, and the up-projections are absorbed
            until `close`. The engine uses all slots of the cache; the caller closes it after the
            engine.
        prefill_chunk: maximum number of prompt tokens per request in one step; 0 means the whole
            prompt. Must be 0 if layers have a state.
        background: whether to map the next step's pages while the current step is computed.
        observer: called with each `StepRecord`.
        kernel: attention kernel; see `pyvmem.attention.Attention`.

    Attributes:
        attention: its `choice` names the kernel.

    Raises:
        ValueError: the cache's layers or heads differ from the model's.
        NotSupported: the model's attention is not causal, with or without windows
            (`pyvmem.models.hf_config.plain_rows`), its MLA differs from DeepSeek-V3's, or it has
            both MLA and states.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        *,
        prefill_chunk: int = 0,
        background: bool = True,
        observer: Callable[[StepRecord], None] | None = None,
        kernel: str = "auto",
    ) -> None:
        if prefill_chunk < 0:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must not be negative")
        text = model.config.get_text_config()
        plain_rows(text, "the engine", *NO_ATTENTION)
        shapes = layer_shapes(text)
        self._states = _states_of(cache, shapes)
        if self._states is not None and latent_rank(text):
            raise NotSupported("the engine: the model mixes MLA and state layers", op="Engine")
        if self._states is not None and prefill_chunk:
            raise NotSupported(
                f"the engine: prefill_chunk is {prefill_chunk}, and the model has layers with a "
                "state: its prompts must be computed whole, since some of transformers' layers "
                "(Jamba's, Bamba's) reset their state in every call of more than one token",
                op="Engine",
            )
        self._attending = {
            layer for layer, shape in enumerate(shapes) if isinstance(shape, LayerShape)
        }
        self._undo = ExitStack()
        with ExitStack() as undo:
            self.attention = Attention(
                cache,
                kernel,
                windows=[getattr(shape, "window", 0) for shape in shapes],
                v_head_dim=latent_rank(text),
            )
            undo.callback(self.attention.close)
            undo.enter_context(absorbed(model))
            self._undo = undo.pop_all()
        self._device = model.device
        self._cache = RequestCache(cache)
        self._scheduler = Scheduler(self._cache, prefill_chunk=prefill_chunk, background=background)
        self._observer = observer
        self.stats = EngineStats()
        attention.register()
        self._model = model
        self._model_attention: str = model.config._attn_implementation
        model.set_attn_implementation(attention.NAME)
        model.eval()
        self._open = True

    def close(self) -> None:
        """Drops unfinished requests and the views of the cache, so that the cache can be closed."""
        if self._open:
            self._open = False
            self._scheduler.waiting.clear()
            self._scheduler.running.clear()
            self._cache.close()
            self._undo.close()
            self._model.set_attn_implementation(self._model_attention)

    @property
    def unfinished(self) -> int:
        """Returns the number of waiting and running requests."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def add(self, job: Job) -> None:
        """Queues a job, which joins in a later step. Raises ValueError as `Scheduler.add` does."""
        self._scheduler.add(job)

    def run(self, jobs: Iterable[Job]) -> Iterator[TokenEvent]:
        """Adds the jobs; yields tokens as they are generated, until all requests are finished."""
        for job in jobs:
            self.add(job)
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """Maps memory and runs the model once; returns a token for each prompt that is complete.

        Raises:
            VMemError: the cache failed for a reason other than running out of memory.
            RuntimeError: requests are waiting, but the cache has no slots for them.
        """
        started = time.perf_counter()
        events: list[TokenEvent] = []
        batch, too_large = self._scheduler.begin()
        ready = time.perf_counter()
        self.stats.step_s += ready - started
        self.stats.preemptions = self._scheduler.preemptions
        self.stats.recomputed_tokens = self._scheduler.recomputed
        if too_large is not None:
            completion = too_large.completion(FinishReason.NO_MEMORY)
            events.append(TokenEvent(too_large.job.request_id, None, completion))
        elif batch:
            self._observe(batch)
            events += self._compute(batch)
        self.stats.total_s += time.perf_counter() - started
        return events

    def _observe(self, batch: list[Sequence]) -> None:
        stats = self.stats
        stats.peak_running = max(stats.peak_running, len(batch))
        if self._observer is not None:
            rows = tuple(
                (one.job.request_id, slot, one.needed)
                for one, slot in zip(batch, self._slots(batch), strict=True)
            )
            self._observer(StepRecord(stats.steps, rows, len(self._scheduler.waiting)))

    def _slots(self, batch: list[Sequence]) -> list[int]:
        return [self._scheduler.running[one].slot for one in batch]

    def _compute(self, batch: list[Sequence]) -> list[TokenEvent]:
        before = time.perf_counter()
        self._scheduler.look_ahead()
        started = time.perf_counter()
        self.stats.ahead_s += started - before
        choices = self._forward(batch)
        model_s = time.perf_counter() - started
        self.stats.model_s += model_s
        self.stats.model_steps_s.append(model_s)
        events = []
        step = self.stats.steps
        self.stats.steps += 1
        for sequence, choice in zip(batch, choices, strict=True):
            prompt_left = len(sequence.job.prompt) - sequence.cached
            self.stats.prompt_tokens += max(0, min(sequence.chunk, prompt_left))
            sequence.cached += sequence.chunk
            sequence.chunk = 0
            if sequence.pending:
                continue  # mid-prompt: the next token comes from the prompt
            self.stats.new_tokens += 1
            reason = sequence.accept(choice, step, self._cache.max_seq_len)
            completion = None
            if reason is not None:
                self._scheduler.finish(sequence)
                completion = sequence.completion(reason)
            events.append(TokenEvent(sequence.job.request_id, sequence.tokens[-1], completion))
        return events

    @torch.inference_mode()
    def _forward(self, batch: list[Sequence]) -> list[int]:
        """Runs the model on the batch's new tokens; returns each request's likeliest next token."""
        if self._states is not None:
            return self._forward_rows(self._states, batch)
        tokens: list[int] = []
        ends: list[int] = []
        for sequence in batch:
            tokens += sequence.tokens[sequence.cached : sequence.needed]
            ends.append(len(tokens) - 1)
        step = self._attention_step(batch)
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=step.batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(ends, device=self._device),
            vmem_step=step,
        )
        self._all_attended(step)
        choices: list[int] = output.logits[0].float().argmax(dim=-1).tolist()
        return choices

    def _forward_rows(self, cache: LayeredCache, batch: list[Sequence]) -> list[int]:
        """Runs `_forward` for models with state layers, which need a batch row per request."""
        from pyvmem.hf.keyword import CACHE
        from pyvmem.serve.states import StepPast

        alone = [[one] for one in batch if not one.cached or one.needed - one.cached > 1]
        decoding = [one for one in batch if one.cached and one.needed - one.cached == 1]
        chosen: dict[Sequence, int] = {}
        for group in ([decoding] if decoding else []) + alone:
            step = self._attention_step(group)
            past = StepPast(cache, self._slots(group), [one.cached for one in group])
            tokens = [one.tokens[one.cached : one.needed] for one in group]
            output = self._model(
                input_ids=torch.tensor(tokens, device=self._device),
                position_ids=step.batch.positions.view(len(group), -1),
                **{CACHE: past},
                use_cache=True,
                logits_to_keep=1,
                vmem_step=step,
            )
            self._all_attended(step)
            past.save()
            found = output.logits[:, -1].float().argmax(dim=-1).tolist()
            chosen.update(zip(group, found, strict=True))
        return [chosen[one] for one in batch]

    def _attention_step(self, batch: list[Sequence]) -> attention.AttentionStep:
        new = [one.needed - one.cached for one in batch]
        lengths = [one.needed for one in batch]
        step = self.attention.batch(self._slots(batch), new, lengths)
        return attention.AttentionStep(self.attention, step)

    def _all_attended(self, step: attention.AttentionStep) -> None:
        """Raises NotSupported for a model that bypasses transformers' attention registry.

        In such a model, requests would attend to each other's tokens, and nothing would be cached.
        """
        missing = self._attending - step.seen
        if missing:
            raise NotSupported(
                f"the engine: layer {min(missing)} of {type(self._model).__name__} does not "
                "use transformers' AttentionInterface",
                op="Engine",
            )


def _states_of(cache: KVCache, shapes: list[Shape]) -> LayeredCache | None:
    """Returns the cache if any layer has states, else None. Raises ValueError if shapes differ."""
    held: list[type] = [LayerShape] * cache.config.num_layers
    if isinstance(cache, LayeredCache):
        held = [type(shape) for shape in cache.layers]
    if len(shapes) != len(held):
        raise ValueError(f"the model has {len(shapes)} layers, the cache {len(held)}")
    for layer, (shape, kind) in enumerate(zip(shapes, held, strict=True)):
        if type(shape) is not kind:
            raise ValueError(
                f"layer {layer} keeps a {type(shape).__name__}, the cache has a {kind.__name__}"
            )
    return cache if isinstance(cache, LayeredCache) and StateShape in held else None
