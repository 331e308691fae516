# SPDX-License-Identifier: MIT
"""A layer of a transformers cache that stores nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import cache_utils

from pyvmem.plumbing.validation import invalid

__all__ = ["VMemNothing"]

# Any, so that type checkers see the same class with and without transformers.
# transformers 5.23 and later recognize such layers by their own base class, DummyLayer.
_Layer: Any = getattr(cache_utils, "DummyLayer", object)


class VMemNothing(_Layer):  # type: ignore[misc]  # a base that is Any
    """A layer of a `VMemCache` that has no attention or reads another layer's keys.

    transformers treats it as neither an attention nor a state layer, so it asks other layers for
    the length.
    """

    supports_early_init = False
    is_compileable = True
    is_croppable = True

    def __init__(self, index: int) -> None:
        self.is_initialized = True
        self.keys = self.values = None
        self._index = index

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Rejects keys and values.

        Raises:
            InvalidArgument: always.
        """
        raise invalid(
            f"layer {self._index} received keys, but stores nothing according to the configuration",
            op="VMemCache",
        )

    def get_max_length(self) -> int:
        """Returns -1: there is no maximum."""
        return -1

    def _nothing(self, *args: Any) -> None:
        """Does nothing: the layer has no rows."""

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _nothing
