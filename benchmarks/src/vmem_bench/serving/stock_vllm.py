# SPDX-License-Identifier: MIT
"""vLLM itself as an arm, with its own model, scheduler, sampler and graphs, without the plug-in.

It compares the speed of `vmem bench serve`'s arms with an engine that is used in production. vLLM's
weights have the same shapes but different random values, and its tokens are sampled, so only times
are compared.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vmem_bench.serving.loop import Outcome
from vmem_bench.vllm.engines import LLAMA, Fleet, Plan
from vmem_bench.vllm.loads import Load, tiny

if TYPE_CHECKING:
    from pyvmem.layouts.workload import Arrival
    from vmem_bench.command import Command
    from vmem_bench.decoder import Sizes
    from vmem_bench.serving.stores import Ints

__all__ = ["serve"]

_NAME = "vllm"


def serve(
    command: Command,
    sizes: Sizes,
    arrivals: Sequence[Arrival],
    tokens: Callable[[int, Arrival], Ints],
    *,
    slots: int,
    limit: int,
    budget: int,
    longest: int,
) -> Outcome:
    """Serves a workload in an engine started just for it.

    Args:
        command: the run's command.
        sizes: the model's shape.
        arrivals: the requests, sorted by time.
        tokens: as in `vmem_bench.serving.loop.serve`, but only for prompts; answers are sampled.
        slots: maximum number of concurrent requests.
        limit: bytes for keys and values.
        budget: maximum new tokens per step.
        longest: number of tokens in the longest request.

    Raises:
        ImportError: vLLM is not installed.
        WrongResult: the engine exited.
        TimeUp: the deadline of the command has passed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("vLLM is not installed")
    load = Load(
        [
            tokens(number, one)[: one.request.context].tolist()
            for number, one in enumerate(arrivals)
        ],
        [one.request.output for one in arrivals],
        [one.at for one in arrivals],
    )
    fleet = Fleet(
        command,
        _shape(sizes),
        max_num_seqs=slots,
        longest=longest,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,  # requests do not share prefixes
    )
    with fleet:
        # One more block, because vLLM reserves one for itself.
        fleet.start({_NAME: Plan(False, limit + fleet.block_bytes)})
        fleet.order(_NAME, **Load.of(tiny(4), sizes.vocabulary, 0).order())
        answer = fleet.order(_NAME, **load.order())
    times: list[list[float]] = answer["times"]
    answers: list[list[int]] = answer["answers"]
    return Outcome(
        finished=sum(len(one) == count for one, count in zip(answers, load.tokens, strict=True)),
        seconds=answer["seconds"],
        first=[one[0] - at for one, at in zip(times, load.at, strict=True)],
        between=[later - one for each in times for one, later in itertools.pairwise(each)],
        prompt_tokens=sum(map(len, load.prompts)),
        new_tokens=sum(map(len, answers)),
    )


def _shape(sizes: Sizes) -> dict[str, object]:
    return {
        **LLAMA,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocabulary,
        "rope_theta": sizes.theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
