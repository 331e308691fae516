# SPDX-License-Identifier: MIT
"""A Llama-like model with random weights: the real model's FLOPs and bytes, but meaningless output.

It is plain torch with rotary embeddings and no tokenizer. The caller supplies attention and the
cache: `pyvmem.attention`, or anything with the same interface. With several ranks (`Shard`), each
rank holds part of the heads and of the MLP, and a full copy of everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.nn.functional import linear, rms_norm, silu

from pyvmem.kvcache import KVCacheConfig
from vmem_bench import fused

__all__ = [
    *("LLAMA_3_8B", "TINY", "YI_34B", "YI_6B"),
    *("Attends", "Decoder", "NewTokens", "Shard", "Sizes"),
]

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
    theta: float = 10000.0  # base of the rotary embedding's frequencies

    @property
    def weights(self) -> int:
        """The number of weights in the layers, the output projection and the embedding."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def token_bytes(self) -> int:
        """The size in bytes of a token's bfloat16 keys and values across all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def on_ranks(self, ranks: int) -> Sizes:
        """Returns the sizes of one rank's part of the model.

        Raises:
            ValueError: `ranks` does not divide the heads or the inner layer.
        """
        if self.kv_heads % ranks or self.heads % ranks or self.inner % ranks:
            raise ValueError(
                f"{self.name}: {self.kv_heads} KV heads cannot be split over {ranks} ranks"
            )
        heads, kv_heads, inner = (n // ranks for n in (self.heads, self.kv_heads, self.inner))
        return replace(self, heads=heads, kv_heads=kv_heads, inner=inner)

    def config(self, **values: Any) -> KVCacheConfig:
        """Returns a cache configuration for this shape, with a K and a V tensor for each layer."""
        return KVCacheConfig(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            **values,
        )


LLAMA_3_8B = Sizes("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 5e5)
YI_6B = Sizes("Yi-6B", 32, 4096, 32, 4, 128, 11008, 64000, 5e6)
YI_34B = Sizes("Yi-34B", 60, 7168, 56, 8, 128, 20480, 64000, 5e6)
TINY = Sizes("a tiny model", 2, 64, 4, 2, 64, 96, 128)


class Shard(NamedTuple):
    """A rank's position among the ranks that share a model.

    Attributes:
        rank: the rank's number, from 0.
        ranks: the number of ranks.
        sum: returns the sum of a tensor over the ranks; may work in place.
    """

    rank: int = 0
    ranks: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


_WHOLE = Shard()


class NewTokens(Protocol):
    """A batch's metadata for a forward pass."""

    @property
    def positions(self) -> torch.Tensor:
        """The position of each new token in its request, ``[tokens]``."""

    @property
    def starts(self) -> torch.Tensor:
        """The index of each request's first new token, then the total, ``[requests + 1]``."""


_Batch = TypeVar("_Batch", bound=NewTokens, contravariant=True)


class Attends(Protocol, Generic[_Batch]):
    """Stores keys and values and attends to them, like `pyvmem.attention.Attention`."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: _Batch) -> None:
        """Stores the new tokens' rows, ``[tokens, num_kv_heads, head_dim]``."""

    def __call__(self, q: torch.Tensor, layer: int, batch: _Batch) -> torch.Tensor:
        """Returns the attention output for queries; both are ``[tokens, heads, head_dim]``."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    inner_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """The model, in bfloat16.

    Its weights depend only on the seed and the device, not on the number of ranks.

    Args:
        sizes: sizes of the whole model.
        device: device of the weights.
        seed: random seed for the weights.
        longest: maximum number of tokens per request.
        shard: this rank's part.

    Attributes:
        sizes: sizes of this rank's part.

    Raises:
        ValueError: see `Sizes.on_ranks`.
    """

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        seed: int = 1,
        longest: int = 1 << 15,
        shard: Shard = _WHOLE,
    ) -> None:
        self.sizes, self._whole, self._shard = sizes.on_ranks(shard.ranks), sizes, shard
        self._rotary = fused.rotary_table(longest, sizes.head_dim, sizes.theta, device)
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        s = sizes
        self.embedding = self._random(s.vocabulary, s.hidden, 1)
        self._layers = [self._layer() for _ in range(s.layers)]
        self._norm = self._ones()
        self._head = self._random(s.vocabulary, s.hidden, s.hidden)

    def _random(self, rows: int, columns: int, inputs: int) -> torch.Tensor:
        """Returns random weights, scaled so that outputs are about as large as inputs."""
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        return weight.normal_(0, inputs**-0.5, generator=self._generator)

    def _ones(self) -> torch.Tensor:
        return torch.ones(self.sizes.hidden, dtype=torch.bfloat16, device=self._device)

    def _part(self, weight: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """Splits a weight by `sizes`; returns this rank's part of each piece, concatenated."""
        rank, ranks, _ = self._shard
        if ranks == 1:
            return weight
        pieces: Any = torch.split(weight, sizes, dim)
        return torch.cat([piece.chunk(ranks, dim)[rank] for piece in pieces], dim)

    def _layer(self) -> _Layer:
        s = self._whole
        across, width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        qkv = self._random(across + 2 * width, s.hidden, s.hidden)
        out = self._random(s.hidden, across, across)
        gate_up = self._random(2 * s.inner, s.hidden, s.hidden)
        down = self._random(s.hidden, s.inner, s.inner)
        return _Layer(
            self._ones(),
            self._part(qkv, 0, [across, width, width]),
            self._part(out, 1, [across]),
            self._ones(),
            self._part(gate_up, 0, [s.inner, s.inner]),
            self._part(down, 1, [s.inner]),
        )

    @torch.inference_mode()
    def __call__(
        self,
        ids: torch.Tensor,
        attend: Attends[_Batch],
        batch: _Batch,
        during: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Runs one forward pass: writes the new tokens' rows into the cache and attends to it.

        Args:
            ids: token ids of the new tokens, request by request, int64 ``[tokens]``.
            attend: stores the rows and attends to them.
            batch: which requests the tokens belong to, and where their rows are.
            during: called once the first layers have been launched, while the GPU is busy.

        Returns:
            The logits of each request's last token, ``[requests, vocabulary]``.
        """
        s = self.sizes
        tokens = ids.shape[0]
        across = s.heads * s.head_dim
        shape = (s.hidden,)
        x = self.embedding[ids]
        for number, layer in enumerate(self._layers):
            normed = rms_norm(x, shape, layer.attention_norm, _EPS)
            qkv = linear(normed, layer.qkv).view(tokens, s.heads + 2 * s.kv_heads, s.head_dim)
            fused.rotate(qkv[:, : s.heads + s.kv_heads], batch.positions, self._rotary)
            q, keys, values = torch.split(qkv, [s.heads, s.kv_heads, s.kv_heads], dim=1)
            attend.write(number, keys, values, batch)
            seen = attend(q, number, batch)
            x = x + self._shard.sum(linear(seen.reshape(tokens, across), layer.out))
            normed = rms_norm(x, shape, layer.inner_norm, _EPS)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=1)
            x = x + self._shard.sum(linear(silu(gate) * up, layer.down))
            if during is not None and number == min(_FIRST_LAYERS, s.layers) - 1:
                during()
        last = x[batch.starts[1:].long() - 1]
        return linear(rms_norm(last, shape, self._norm, _EPS), self._head)
