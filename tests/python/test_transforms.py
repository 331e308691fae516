# SPDX-License-Identifier: MIT
"""Tests torch.export, torch.jit.trace, torch.func and checkpoints over code that writes rows.

Each either produces correct results or is rejected with a message that says what to do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import open_context

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from pyvmem import KVCache, KVCacheConfig, NotSupported  # noqa: E402
from pyvmem.attention import Attention  # noqa: E402
from pyvmem.compiled import Writer  # noqa: E402
from pyvmem.hf import VMemCache  # noqa: E402

pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer of an engine's model, which computes the last of a request's 100 tokens."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.slot = cache.alloc_reqid()
        assert cache.step([100 if each == self.slot else 0 for each in range(2)]) == 0
        self.rows = cache.k(0)[self.slot]
        self.rows[:100] = 1
        self.attend = Attention(cache)
        self.batch = self.attend.batch([self.slot], [1], [100])

    def forward(self, x: Any) -> Any:
        self.attend.write(0, x[:, :2] * 2, x[:, 2:], self.batch)
        return self.attend(x, 0, self.batch)


@pytest.fixture
def layers() -> Iterator[list[Layer]]:
    """Yields two identical layers with separate caches, so that neither sees the other's rows."""
    with open_context("host") as context:
        config = KVCacheConfig(1, 2, 16, "float32", 2, 4096)
        with KVCache(config, context=context) as one, KVCache(config, context=context) as other:
            both = [Layer(one), Layer(other)]
            yield both
            for layer in both:
                layer.attend.close()
                del layer.rows
            gc.collect()


@pytest.fixture
def layer(layers: list[Layer]) -> Layer:
    return layers[0]


def export(layer: Layer, x: Any, strict: bool) -> Callable[[Any], Any]:
    program: Callable[[Any], Any] = torch.export.export(layer, (x,), strict=strict).module()
    return program


RECORDERS: dict[str, Callable[[Layer, Any], Callable[[Any], Any]]] = {
    "torch.export": lambda layer, x: export(layer, x, False),
    "torch.export, strict": lambda layer, x: export(layer, x, True),
    "torch.jit.trace": lambda layer, x: torch.jit.trace(layer, (x,)),
}


@pytest.mark.parametrize("record", RECORDERS.values(), ids=RECORDERS)
def test_recorded_code_writes_each_time(layer: Layer, record: Any) -> None:
    with torch.no_grad():
        program = record(layer, torch.randn(1, 4, 16))
        for _ in range(2):
            x = torch.randn(1, 4, 16)
            layer.rows[99] = float("nan")
            found = program(x)
            assert layer.rows[99].equal(x[0, :2] * 2)
            torch.testing.assert_close(found, layer(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_over_attention(layers: list[Layer], reentrant: bool) -> None:
    """The forward pass that checkpointing reruns writes the same rows."""
    x = torch.randn(1, 4, 16)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    checkpoint(layers[0], one, use_reentrant=reentrant).square().sum().backward()
    layers[1](other).square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert layers[0].rows[:100].equal(layers[1].rows[:100])


def test_vmap_over_reads(layer: Layer) -> None:
    with torch.no_grad():
        several = torch.randn(3, 1, 4, 16)
        found = torch.vmap(lambda q: layer.attend(q, 0, layer.batch))(several)
        wanted = torch.stack([layer.attend(q, 0, layer.batch) for q in several])
        torch.testing.assert_close(found, wanted)


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda run, x: torch.vmap(run)(x[None]),
    "grad": lambda run, x: torch.func.grad(lambda y: run(y).sum())(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_writes_under_a_transform_are_rejected(layer: Layer, transform: Any) -> None:
    before, writer = layer.rows[:100].clone(), Writer(layer.rows[None])

    def write(x: Any) -> Any:
        writer.write(x[:, :2], torch.tensor([0]), torch.tensor([99]))
        return x

    with pytest.raises(NotSupported, match=r"Attention.write under a transform .*: call it out"):
        transform(layer, torch.randn(1, 4, 16))
    with pytest.raises(NotSupported, match=r"Writer.write under a transform .*: call it outside"):
        transform(write, torch.randn(1, 4, 16))
    writer.close()
    assert layer.rows[:100].equal(before)


class Past(torch.nn.Module):  # type: ignore[misc]
    """A layer of a transformers model, with a `VMemCache` for its keys and values."""

    def __init__(self, past: VMemCache) -> None:
        super().__init__()
        self.past = past

    def forward(self, x: Any) -> Any:
        return self.past.update(x, x, 0)[0].exp().sum()


MISUSES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "torch.export": (
        "recorded by torch.export",
        lambda model, x: torch.export.export(model, (x,), strict=False),
    ),
    "torch.jit.trace": ("or torch.jit.trace", lambda model, x: torch.jit.trace(model, (x,))),
    "vmap": ("under a transform", lambda model, x: torch.vmap(model)(x[None])),
    "checkpoint": (
        "in a backward pass, where torch.utils.checkpoint",
        lambda model, x: checkpoint(model, x, use_reentrant=False).backward(),
    ),
    "reentrant checkpoint": (
        "in a backward pass, where torch.utils.checkpoint",
        lambda model, x: checkpoint(model, x, use_reentrant=True).backward(),
    ),
}


@pytest.mark.parametrize(("text", "misuse"), MISUSES.values(), ids=MISUSES)
def test_a_vmemcache_rejects_transforms_that_lose_its_mapping(text: str, misuse: Any) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    with VMemCache(config, 2, 64) as past:
        model, x = Past(past), torch.randn(1, 2, 1, 8, requires_grad=True)
        model(x)
        length = past.get_seq_length()
        with pytest.raises(NotSupported, match=text):
            misuse(model, x)
        # A checkpoint's first run is an ordinary run.
        assert past.get_seq_length() == length + ("checkpoint" in text)
        del model
        gc.collect()
