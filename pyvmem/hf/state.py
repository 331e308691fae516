# SPDX-License-Identifier: MIT
"""A stateful layer of a `VMemCache`, such as linear attention or a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from transformers import cache_utils

from pyvmem.compiled import refuse
from pyvmem.errors import NotSupported
from pyvmem.hf.rows import Rows, TakesRows, uncompiled
from pyvmem.plumbing.validation import invalid

__all__ = ["VMemState"]

# Any, so that type checkers see the same class with and without transformers.
_Layer: Any = cache_utils.LinearAttentionLayer


class VMemState(TakesRows, _Layer):  # type: ignore[misc]  # a base that is Any
    """A stateful layer, created by `VMemCache`.

    It writes its states in place, as transformers' own layer does, but keeps them in the rows'
    slots: `conv_states` and `recurrent_states` are views ``[batch, ...]``.
    """

    is_compileable = False  # the views are dropped and recreated
    is_croppable = False
    tokens = 1  # a state's pages do not depend on the number of tokens
    device: Any
    has_previous_state: Any

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()
        self._rows = rows
        self._index = index

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # the base class has an attribute
        """True if the layer has slots."""
        return hasattr(self, "batch_size")

    @uncompiled
    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Allocates a slot for every row of the states ``[batch, ...]``.

        Raises:
            InvalidArgument: the shape or dtype differs from the configuration's.
        """
        for name, new in (("conv", conv_states), ("recurrent", recurrent_states)):
            if new is None:
                continue
            sizes = tuple(new.shape[1:])
            if name == "conv":
                sizes = (*sizes[:-1], conv_kernel_size or sizes[-1])
                self.conv_kernel_size[state_idx] = sizes[-1]
            self._rows.open_state(self._index, name, new, sizes)
            if self.device is None:
                self.dtype, self.device = new.dtype, new.device
            self._show(name, new.shape[0])

    @uncompiled
    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Updates the state as transformers' own layer does, but in the slots."""
        refuse("VMemCache.update_conv_state", recorded=True)
        taken: torch.Tensor = super().update_conv_state(*args, **kwargs)
        return taken

    @uncompiled
    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Updates the state as transformers' own layer does, but in the slots."""
        refuse("VMemCache.update_recurrent_state", recorded=True)
        taken: torch.Tensor = super().update_recurrent_state(*args, **kwargs)
        return taken

    def _show(self, name: str, batch: int) -> None:
        self._rows.hold(batch, max(self.tokens, self._rows.length))
        # Limit the storage to these slots, which all have pages: models write states themselves,
        # and torch.compile may copy the whole storage of a tensor that it writes.
        with torch.inference_mode(False):  # so that code outside inference mode can also write it
            view = from_dlpack(self._rows.state(self._index, name)[:batch].detach())
        if name == "conv":
            self.conv_states[0], self.is_conv_states_initialized[0] = view, True
        else:
            self.recurrent_states[0], self.is_recurrent_states_initialized[0] = view, True
        self.batch_size = batch

    def _held(self) -> dict[str, torch.Tensor]:
        both = {"conv": self.conv_states[0], "recurrent": self.recurrent_states[0]}
        return {name: one for name, one in both.items() if one is not None}

    def take_from(self, other: VMemState) -> None:
        """Copies another cache's layer; see `VMemLayer.take_from`."""
        for name, rows in other._held().items():
            rows = rows.detach()
            kernel = other.conv_kernel_size[0] if name == "conv" else None
            given: dict[str, Any] = {f"{name}_states": rows, "conv_kernel_size": kernel}
            self.lazy_initialization(**given)
            self._held()[name].copy_(rows)
        self.has_previous_state = dict(other.has_previous_state)

    def crop(self, tokens_to_remove: int) -> None:
        """Raises an error, since a state cannot be rolled back.

        Raises:
            InvalidArgument: always, except for 0.
        """
        if tokens_to_remove:
            raise invalid(
                f"crop({tokens_to_remove}): the state of layer {self._index} cannot be rolled back",
                op="VMemCache",
            )

    def check_back(self, length: int) -> None:
        """Raises InvalidArgument, even for 0 tokens, since a state cannot be rolled back."""
        raise invalid(
            f"{length} tokens: the state of layer {self._index} cannot be rolled back; compute the "
            "tokens again after reset",
            op="VMemCache",
        )

    def activate_past_recording(self) -> None:
        """Raises an error, since recording would have to keep the states of earlier tokens.

        Raises:
            NotSupported: always.
        """
        raise NotSupported(
            f"layer {self._index} keeps only the state after its last token: it cannot be used in "
            "assisted generation",
            op="VMemCache",
        )

    @uncompiled
    def reset(self) -> None:
        """Empties the layer.

        Once all layers are empty, the slots are free; their pages remain mapped.
        """
        self.forget()
        self._rows.settle()

    def forget(self) -> None:
        """Drops the views."""
        for states in (self.conv_states, self.recurrent_states):
            states[0] = None
        for flags in (
            self.is_conv_states_initialized,
            self.is_recurrent_states_initialized,
            self.has_previous_state,
        ):
            flags[0] = False
        self.__dict__.pop("batch_size", None)  # transformers checks for this attribute

    def _take(self, source: Sequence[int]) -> None:
        if not self.is_initialized:
            return
        self._check_rows(source)
        for name, rows in self._held().items():
            taken = rows[torch.tensor(source, device=rows.device)]
            self._show(name, len(source))
            self._held()[name].copy_(taken)
        self._rows.settle()
