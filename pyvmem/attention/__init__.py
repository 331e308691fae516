# SPDX-License-Identifier: MIT
"""Attention over the slots of a cache, with third-party kernels.

    attend = Attention(cache)                       # picks a kernel; print(attend.choice)
    batch = attend.batch(reqids, q_lens, kv_lens)   # once per step, after cache.step
    for layer in range(layers):
        attend.write(layer, key, value, batch)      # the new tokens' rows
        out = attend(q, layer, batch)

A slot is contiguous in virtual memory, so unmodified kernels can read it without a gather; a paged
kernel reads it through the trivial block table 0, 1, 2, ... `KERNELS` lists how far each kernel
reads past a request's length; a call that could read an unmapped row is rejected. `attention` does
all of this in one call. Under `torch.compile`, writing and attending become custom operators
(`pyvmem.compiled`), which do not record gradients.

The layers of a `pyvmem.kvcache.LayeredCache` may differ in number of heads, head size or window, or
store a latent (MLA); kernels are chosen separately for each form of layer. Requires torch.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pyvmem import compiled
from pyvmem.attention import latent
from pyvmem.attention.batch import Batch, OverRead, Part, Run
from pyvmem.attention.kernels import (
    KERNELS,
    Choice,
    check_name,
    choose,
    overread_rows,
    probe,
)
from pyvmem.attention.latent import UpProjections
from pyvmem.attention.layers import Form, forms_of
from pyvmem.attention.scales import FP8, quantised, scales_of
from pyvmem.compiled import ORDER, Writer, as_operator
from pyvmem.kvcache.config import PREFILL_TOKENS
from pyvmem.plumbing.validation import expect, invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache

__all__ = [
    "KERNELS",
    "Attention",
    "Batch",
    "Choice",
    "OverRead",
    "Run",
    "UpProjections",
    "attention",
    "choose",
    "overread_rows",
    "probe",
]


class _Layer(NamedTuple):
    """A layer's K and V, ``[max_batch, max_seq_len, num_kv_heads, head_dim]``, and its form."""

    k: Writer
    v: Writer
    form: int


class Attention:
    """Attention kernels bound to the tensors of a cache.

    Args:
        cache: the cache to read and write; layers without keys and values are ignored. Close this
            object before the cache.
        kernel: "auto", or one of `KERNELS` for all layers.
        windows: per layer, the number of tokens a token attends to, if fewer than the cache keeps;
            None: all tokens that the cache keeps.
        v_head_dim: for a cache with one tensor per layer (MLA's latent): the number of leading
            elements of a row that are the values.
        scales: for 8-bit keys and values: per layer a pair (keys, values), each a number or one
            number per KV head; None: all scales are 1. See `pyvmem.attention.scales`.

    Attributes:
        choice: the first layer's kernels for prefill and for decoding, and why the others were not
            chosen.
        choices: one `Choice` per form of layer, ordered by the first layer of each form.

    Raises:
        InvalidArgument: the kernel cannot be used on this cache; the message says why.
    """

    def __init__(
        self,
        cache: KVCache,
        kernel: str = "auto",
        *,
        windows: Sequence[int] | None = None,
        v_head_dim: int = 0,
        scales: Sequence[tuple[Any, Any]] | None = None,
    ) -> None:
        check_name(kernel)
        forms = forms_of(cache, windows, v_head_dim)
        self._device = cache.caches[0].k(0).device
        self._forms = [form for form in dict.fromkeys(forms) if form is not None]
        if not self._forms:
            raise invalid("no layer of the cache has keys and values", op="Attention")
        self._caches = [form.caches for form in self._forms]
        self.choices = [choose(form, self._device, kernel) for form in self._forms]
        self.choice = self.choices[0]
        self._dtype = self._forms[0].dtype
        heads = [1 if one is None else one.keys.config.num_kv_heads for one in forms]
        self._scales = scales_of(scales, heads, self._device) if self._dtype == FP8 else None
        if scales is not None and self._scales is None:
            raise invalid(
                f"scales are for keys and values of {FP8}, not {self._dtype}", op="Attention"
            )
        self._layers = [
            None if form is None else _layer(cache, number, form, self._forms)
            for number, form in enumerate(forms)
        ]
        self._widths = [0 if form is None else form.v_head_dim for form in forms]
        self._ticket = compiled.ticket(self)

    def __repr__(self) -> str:
        layers = sum(layer is not None for layer in self._layers)
        return (
            f"<Attention of {layers} layers by {self.choice.name}, {self.choice.decode} decoding>"
        )

    def batch(self, reqids: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Batch:
        """Creates the batch of a step, for all layers, after checking its lengths. See `Batch`.

        It uses the `decode` kernels of `choices` if no request has more than `PREFILL_TOKENS` new
        tokens. Otherwise it uses the `name` kernels, unless they could read unmapped rows.

        Raises:
            OverRead: both kernels could read unmapped rows.
            InvalidArgument: as for `Batch`.
        """
        decode = [choice.decode for choice in self.choices]
        prefill = [choice.name for choice in self.choices]
        kernels = decode if max(q_lens, default=0) <= PREFILL_TOKENS else prefill
        try:
            return self._batch(kernels, reqids, q_lens, kv_lens)
        except OverRead:
            if kernels == decode:
                raise
            return self._batch(decode, reqids, q_lens, kv_lens)

    def _batch(
        self,
        kernels: Sequence[str],
        reqids: Sequence[int],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
    ) -> Batch:
        parts = [
            Part(form.caches, name, KERNELS[name].reads(self._device), form.window)
            for form, name in zip(self._forms, kernels, strict=True)
        ]
        return Batch(parts, reqids, q_lens, kv_lens, self._device)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor | None, batch: Batch
    ) -> None:
        """Writes the new tokens' rows into their slots.

        Args:
            layer: index of a layer of the cache.
            key: ``[tokens, num_kv_heads, head_dim]``; for a latent, whole rows.
            value: ``[tokens, num_kv_heads, v_head_dim]``; for a latent, None.
            batch: a batch from this object's `batch`.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype or device.
        """
        if as_operator():
            rows = [key] if value is None else [key, value]
            compiled.write(ORDER, self._ticket, layer, [batch.ticket, *rows])
        else:
            self._write(layer, key, value, batch)

    def _write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor | None, batch: Batch
    ) -> None:
        compiled.refuse("Attention.write")
        one = self._layer(layer)
        latent = self._forms[one.form].latent
        if latent != (value is None):
            raise invalid(
                f"layer {layer} has {'one tensor' if latent else 'values; pass value='}",
                op="Attention",
            )
        self._check_batch(batch)
        where = (batch.slots, batch.positions)
        rows = [("key", key, one.k)] + ([] if value is None else [("value", value, one.v)])
        for name, new, to in rows:
            self._check(name, new, (batch.tokens, *to.tensor.shape[2:]))
        for at, (_, new, to) in enumerate(rows):
            if self._scales is not None:
                scales = self._scales[layer]
                new = quantised(new, scales.value if at else scales.key)
            to.put(new, where)

    def run_write(self, part: int, given: Sequence[torch.Tensor]) -> None:
        """Implements the operator ``pyvmem::write``."""
        batch, key, *value = given
        self._write(part, key, value[0] if value else None, compiled.holder(batch))

    def run_attend(
        self, part: int, given: Sequence[torch.Tensor], scale: float | None
    ) -> torch.Tensor:
        """Implements the operator ``pyvmem::attend``."""
        batch, q, *up = given
        return self._attend(
            q, part, compiled.holder(batch), scale, UpProjections(*up) if up else None
        )

    def __call__(
        self,
        q: torch.Tensor,
        layer: int,
        batch: Batch,
        *,
        scale: float | None = None,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        """Computes causal attention of each new token over its own request.

        Args:
            q: ``[tokens, num_heads, head_dim]``, in the cache's dtype (8-bit caches: bfloat16);
                `num_heads` is a multiple of the number of KV heads.
            layer: index of a layer of the cache; its new rows must have been written.
            batch: a batch from this object's `batch`.
            scale: scale of the scores; None: ``head_dim ** -0.5``.
            up: for a latent, the up-projections of its keys and values. Each query then has ``nope
                + rotary`` elements, and the result holds up-projected values. For requests with
                many new tokens, keys and values are expanded first (`pyvmem.attention.latent`).

        Returns:
            ``[tokens, num_heads, v_head_dim]``, in the dtype of `q`; `v_head_dim` comes from `up`,
            if given.

        Raises:
            InvalidArgument: a tensor has the wrong shape, dtype or device.
        """
        if as_operator():
            given = [batch.ticket, q, *(() if up is None else up)]
            width = self._widths[layer] if up is None else up.value.shape[1]
            out: torch.Tensor = compiled.attend(ORDER, self._ticket, layer, given, scale, width)
            return out
        return self._attend(q, layer, batch, scale, up)

    def _attend(
        self,
        q: torch.Tensor,
        layer: int,
        batch: Batch,
        scale: float | None,
        up: UpProjections | None,
    ) -> torch.Tensor:
        one = self._layer(layer)
        k, v = one.k.tensor, one.v.tensor
        expect("q", q, torch.Tensor)
        heads = q.shape[1] if q.ndim == 3 else 1
        self._check_batch(batch)
        wide = k.shape[3] if up is None else self._check_up(layer, one, heads, up)
        self._check("q", q, (batch.tokens, heads, wide))
        if heads % k.shape[2] or not heads:
            raise invalid(
                f"q has {heads} heads; expected a multiple of the {k.shape[2]} KV heads",
                op="Attention",
            )
        part = batch.parts[one.form]
        run: Any = KERNELS[part.kernel].run
        more = {} if self._scales is None else {"scales": self._scales[layer]}
        scale = wide**-0.5 if scale is None else scale
        out: torch.Tensor
        if up is None:
            out = run(q, k, v, batch, scale, part.window, **more)
        else:
            out = latent.attend(run, q, k, v, batch, scale, part.window, up)
        return out

    def _check_up(self, layer: int, one: _Layer, heads: int, up: UpProjections) -> int:
        """Checks `up`; returns the query's number of elements per head, nope plus rotary."""
        form, slots = self._forms[one.form], one.k.tensor.shape
        if not form.latent or slots[2] != 1:
            raise invalid(
                f"layer {layer} does not store an MLA latent, so it has no up-projections",
                op="Attention",
            )
        expect("up", up, UpProjections)
        key, value = up
        nope, values = (part.shape[1] if part.ndim == 3 else 1 for part in up)
        self._check("up.key", key, (heads, nope, form.v_head_dim))
        self._check("up.value", value, (heads, values, form.v_head_dim))
        return nope + slots[3] - form.v_head_dim

    def is_latent(self, layer: int) -> bool:
        """Returns true if the layer stores MLA's latent; `write` then takes no values for it."""
        return self._forms[self._layer(layer).form].latent

    def window(self, layer: int) -> int:
        """Returns the layer's window in tokens, including the current token; 0 for no window."""
        return self._forms[self._layer(layer).form].window

    def _layer(self, layer: int) -> _Layer:
        layer, last = operator.index(layer), len(self._layers) - 1
        if not 0 <= layer <= last:
            raise invalid(f"layer {layer} is not between 0 and {last}", limit=last, op="Attention")
        one = self._layers[layer]
        if one is None:
            raise invalid(f"layer {layer} has no keys and values to attend to", op="Attention")
        return one

    def close(self) -> None:
        """Drops the cache's tensors, so that the cache can be closed."""
        self._layers = []
        if any("flex" in (choice.name, choice.decode) for choice in self.choices):
            gc.collect()  # torch.compile's traces hold their inputs in reference cycles

    def _check_batch(self, batch: Batch) -> None:
        expect("batch", batch, Batch)
        if [part.caches for part in batch.parts] != self._caches or batch.kernel not in KERNELS:
            raise invalid(
                f"the batch belongs to another cache (kernel {batch.kernel!r}); make one with "
                "Attention.batch",
                op="Attention",
            )

    def _check(self, name: str, rows: torch.Tensor, want: tuple[int, ...]) -> None:
        expect(name, rows, torch.Tensor)
        kind = str(rows.dtype).removeprefix("torch.")
        dtype = "bfloat16" if self._scales is not None else self._dtype
        if tuple(rows.shape) != want or kind != dtype or rows.device != self._device:
            raise invalid(
                f"{name} is {tuple(rows.shape)} {kind} on {rows.device}; expected {want} "
                f"{dtype} on {self._device}",
                op="Attention",
            )


def _layer(cache: KVCache, number: int, form: Form, forms: Sequence[Form]) -> _Layer:
    k = cache.k(number)
    v = k[..., : form.v_head_dim] if form.latent else cache.v(number)
    return _Layer(Writer(k), Writer(v), forms.index(form))


def attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    reqids: Sequence[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    scale: float | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Computes attention in a single call.

    Slower than `Attention`, because every call chooses the kernels and checks the lengths.

    Args:
        q: the requests' new tokens, concatenated, ``[tokens, heads, head_dim]``.
        cache: the cache to read. The new tokens' rows must already be written.
        layer: index of the layer in the cache.
        reqids: see `Batch`.
        q_lens: see `Batch`.
        kv_lens: see `Batch`.
        scale: see `Attention`.
        kernel: see `Attention`.
    """
    attend = Attention(cache, kernel)
    try:
        return attend(q, layer, attend.batch(reqids, q_lens, kv_lens), scale=scale)
    finally:
        attend.close()
