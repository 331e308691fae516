# SPDX-License-Identifier: MIT
"""A model of Llama's kind with random weights: the FLOPs and bytes of the real one, no text.

Plain torch over `pyvmem.attention`, without a tokenizer, rotary embedding (a few operations on
queries and keys that move no weights and no cache) or tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from pyvmem.kvcache import KVCacheConfig

if TYPE_CHECKING:
    from pyvmem.attention import Attention, Batch

__all__ = ["LLAMA_3_8B", "TINY", "Decoder", "Sizes"]

_EPS = 1e-5
_FIRST_LAYERS = 4


@dataclass(frozen=True)
class Sizes:
    """The public configuration of a model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """How many numbers: the layers', the output's and the embedding's."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers, bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def config(self, **values: Any) -> KVCacheConfig:
        """A cache of this shape, a K and a V tensor for each layer."""
        return KVCacheConfig(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            **values,
        )


LLAMA_3_8B = Sizes("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)
TINY = Sizes("a tiny model", 2, 64, 4, 2, 64, 96, 128)


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    inner_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """The weights, bfloat16, the same for the same seed and device.

    Args:
        sizes: of the model.
        device: where it lies.
        seed: of the weights.
    """

    def __init__(self, sizes: Sizes, device: torch.device, seed: int = 1) -> None:
        self.sizes = sizes
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        s = sizes
        self.embedding = self._random(s.vocabulary, s.hidden, 1)
        self._layers = [self._layer() for _ in range(s.layers)]
        self._norm = self._ones()
        self._head = self._random(s.vocabulary, s.hidden, s.hidden)

    def _random(self, rows: int, columns: int, inputs: int) -> torch.Tensor:
        """Numbers of such a size that outputs are about as large as inputs."""
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        return weight.normal_(0, inputs**-0.5, generator=self._generator)

    def _ones(self) -> torch.Tensor:
        return torch.ones(self.sizes.hidden, dtype=torch.bfloat16, device=self._device)

    def _layer(self) -> _Layer:
        s = self.sizes
        across = s.heads * s.head_dim
        return _Layer(
            self._ones(),
            self._random(across + 2 * s.kv_heads * s.head_dim, s.hidden, s.hidden),
            self._random(s.hidden, across, across),
            self._ones(),
            self._random(2 * s.inner, s.hidden, s.hidden),
            self._random(s.hidden, s.inner, s.inner),
        )

    @torch.inference_mode()
    def __call__(
        self,
        ids: torch.Tensor,
        attend: Attention,
        batch: Batch,
        during: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One forward pass: writes the new tokens' rows into the cache and reads it.

        Args:
            ids: of the new tokens, one request after the other, int64 ``[tokens]``.
            attend, batch: see `pyvmem.attention`.
            during: called when the first layers were launched, so that a GPU is busy meanwhile.

        Returns:
            The logits of each request's last token, ``[requests, vocabulary]``.
        """
        s = self.sizes
        tokens = ids.shape[0]
        across, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        shape = (s.hidden,)
        x = self.embedding[ids]
        for number, layer in enumerate(self._layers):
            normed = rms_norm(x, shape, layer.attention_norm, _EPS)
            q, k, v = torch.split(linear(normed, layer.qkv), [across, kv, kv], dim=1)
            keys = k.view(tokens, s.kv_heads, s.head_dim)
            values = v.view(tokens, s.kv_heads, s.head_dim)
            attend.write(number, keys, values, batch)
            seen = attend(q.view(tokens, s.heads, s.head_dim), number, batch)
            x = x + linear(seen.view(tokens, across), layer.out)
            normed = rms_norm(x, shape, layer.inner_norm, _EPS)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=1)
            x = x + linear(silu(gate) * up, layer.down)
            if during is not None and number == min(_FIRST_LAYERS, s.layers) - 1:
                during()
        last = x[batch.starts[1:].long() - 1]
        return linear(rms_norm(last, shape, self._norm, _EPS), self._head)
