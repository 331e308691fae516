# SPDX-License-Identifier: MIT
"""The tensors of a cache, made when first asked for."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.layout import Layout

if TYPE_CHECKING:
    import torch

    from pyvmem.reservation import Reservation

__all__ = ["Views"]


class Views:
    """Makes the group tensors once and cuts layers out of them."""

    def __init__(self, layout: Layout, reservation: Reservation) -> None:
        self._layout = layout
        self._reservation = reservation
        self._tensors: list[torch.Tensor] = []

    def tensors(self) -> list[torch.Tensor]:
        """Each group's tensors: ``[batch, rows, group_size, num_kv_heads, head_dim]``."""
        if not self._tensors:
            self._tensors = [self._make(index) for index in range(self._layout.num_tensors)]
        return list(self._tensors)

    def layer(self, layer: int, which: int) -> torch.Tensor:
        """K (`which` 0) or V (1) of a layer, ``[batch, rows, num_kv_heads, head_dim]``."""
        config = self._layout.config
        index, last = operator.index(layer), config.num_layers - 1
        if not 0 <= index <= last:
            raise invalid(f"layer {index} is not between 0 and {last}", limit=last)
        per_layer = config.tensors_per_layer
        if which >= per_layer:
            raise invalid(f"layer {index} has no values: tensors_per_layer is {per_layer}")
        group, member = divmod(index, config.group_size)
        return self.tensors()[per_layer * group + which][:, :, member]

    def drop(self) -> None:
        """Lets go of the tensors, so that only the caller's own keep the reservation."""
        self._tensors = []

    def _make(self, index: int) -> torch.Tensor:
        import torch

        layout, config = self._layout, self._layout.config
        item = config.itemsize
        strides = (
            layout.slot_bytes,
            layout.row_bytes,
            layout.head_row_bytes,
            config.head_dim * item,
            item,
        )
        tensor: torch.Tensor = self._reservation.tensor(
            (
                config.max_batch,
                config.max_seq_len,
                config.group_size,
                config.num_kv_heads,
                config.head_dim,
            ),
            getattr(torch, str(config.dtype)),
            strides=tuple(stride // item for stride in strides),
            offset=layout.offset(0, 0, index),
        )
        return tensor
