# SPDX-License-Identifier: MIT
"""A small model with random weights for unit tests, and its reference answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pyvmem.serve.job import Job
from pyvmem.serve.model import LoadedModel
from pyvmem.serve.verify import Reference, references

VOCABULARY = 199


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: tiny matrices gain nothing from more threads, and on a busy
    machine the threads wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(layers: int = 3) -> LoadedModel:
    """Builds a model with 192-byte rows (2 heads of 24 float32 elements), which do not divide a
    page evenly.
    """
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, None, Path("random"), "random", frozenset())


def make_requests(
    count: int,
    seed: int = 1,
    shortest: int = 1,
    longest: int = 70,
    new_tokens: tuple[int, int] = (1, 40),
) -> list[Job]:
    """Returns requests of different lengths; the same arguments give the same requests."""
    dice = random.Random(seed)
    return [
        Job(
            i,
            tuple(dice.randrange(1, VOCABULARY) for _ in range(dice.randint(shortest, longest))),
            dice.randint(*new_tokens),
        )
        for i in range(count)
    ]


def expected(loaded: LoadedModel, requests: list[Job]) -> dict[int, Reference]:
    """Returns the answers from ``generate``, keyed by request id."""
    found = references(loaded, requests)
    return {request.request_id: item for request, item in zip(requests, found, strict=True)}
