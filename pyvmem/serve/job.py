# SPDX-License-Identifier: MIT
"""A job, its progress, and its answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Completion", "FinishReason", "Job", "Sequence"]


class FinishReason(enum.Enum):
    """Why a request ended."""

    EOS = "eos"  # the model generated an end-of-text token
    LENGTH = "length"  # the answer has reached max_new_tokens tokens
    SLOT_FULL = "slot_full"  # the request has reached the cache's max_seq_len
    NO_MEMORY = "no_memory"  # the request does not fit in the KV memory even on its own


@dataclass(frozen=True)
class Job:
    """A prompt to be continued greedily.

    Attributes:
        request_id: the caller's id, unique among the engine's unfinished requests.
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate, at least one.
        eos_token_ids: tokens that end the answer; the answer includes the token.
        forced: tokens for teacher forcing. Token i of the answer is replaced by ``forced[i]``
            before the next one is computed; the model's own choice is in `Completion.predictions`.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id}: the prompt is empty")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: max_new_tokens is {self.max_new_tokens}; "
                "at least 1 is needed"
            )


@dataclass(frozen=True)
class Completion:
    """The answer to a job.

    Attributes:
        tokens: the answer's token ids, including any end-of-text token.
        predictions: the model's choice at each position; differs from `tokens` only with `forced`.
        preemptions: number of times the request lost its memory and was recomputed.
        first_step, last_step: engine steps that generated its first and last tokens; -1 if none
            did.
    """

    job: Job
    tokens: tuple[int, ...]
    predictions: tuple[int, ...]
    reason: FinishReason
    preemptions: int
    first_step: int
    last_step: int


@dataclass(eq=False)
class Sequence:
    """A job in progress. The keys and values of ``tokens[:cached]`` are in the cache.

    Attributes:
        tokens: the prompt and the answer so far.
        cached: leading tokens that are in the cache.
        chunk: tokens that this step adds to the cache.
    """

    job: Job
    tokens: list[int]
    cached: int = 0
    chunk: int = 0
    predictions: list[int] = field(default_factory=list)
    preemptions: int = 0
    first_step: int = -1
    last_step: int = -1

    @classmethod
    def of(cls, job: Job) -> Sequence:
        """Creates the initial sequence of a job."""
        return cls(job, list(job.prompt))

    @property
    def answer(self) -> list[int]:
        """Returns the tokens generated so far."""
        return self.tokens[len(self.job.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache; 1 while decoding."""
        return len(self.tokens) - self.cached

    @property
    def needed(self) -> int:
        """Tokens that the cache must hold in this step."""
        return self.cached + self.chunk

    def accept(self, predicted: int, step: int, max_seq_len: int) -> FinishReason | None:
        """Appends the model's choice or the forced token; returns the finish reason, if any."""
        position = len(self.predictions)
        self.predictions.append(predicted)
        forced = self.job.forced
        token = forced[position] if position < len(forced) else predicted
        self.tokens.append(token)
        if self.first_step < 0:
            self.first_step = step
        self.last_step = step
        if token in self.job.eos_token_ids:
            return FinishReason.EOS
        if len(self.predictions) >= self.job.max_new_tokens:
            return FinishReason.LENGTH
        if len(self.tokens) > max_seq_len:
            return FinishReason.SLOT_FULL
        return None

    def completion(self, reason: FinishReason) -> Completion:
        """Returns the answer for the caller."""
        return Completion(
            self.job,
            tuple(self.answer),
            tuple(self.predictions),
            reason,
            self.preemptions,
            self.first_step,
            self.last_step,
        )
