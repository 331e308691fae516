# SPDX-License-Identifier: MIT
"""`VMemCache`: a transformers cache whose rows are contiguous in virtual memory.

transformers' `DynamicCache` copies all earlier tokens for each new one (`torch.cat`); its
`StaticCache` allocates all memory at once and attends over all of it. Here, a batch row is a slot
of a `pyvmem.KVCache` and grows in place; earlier tokens are never copied, and attention gets a view
of exactly the valid tokens. Tested with transformers 5.17.0, 5.23.0 and 5.24.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import cache_utils

from pyvmem.errors import NotSupported
from pyvmem.hf.empty import VMemNothing
from pyvmem.hf.keyword import CACHE
from pyvmem.hf.layer import VMemLayer
from pyvmem.hf.rows import GIVEN, Rows, Settings
from pyvmem.hf.state import VMemState
from pyvmem.kvcache import EmptyShape, KVCache, LayerShape, StateShape, layer_shapes
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.config import LONGEST, MOST_SLOTS
from pyvmem.kvcache.layered_cache import check_arguments
from pyvmem.memory.context import Context
from pyvmem.models.hf_config import ATTENTION, NO_ATTENTION
from pyvmem.plumbing.closing import MustClose
from pyvmem.plumbing.reentry import when_collected
from pyvmem.plumbing.validation import bounded, invalid

__all__ = ["VMemCache", "drafting"]

_VIEWED = frozenset({"gpt_neox_japanese"})
"""Model types whose code merges dimensions of the cached keys with `view`."""

# Any, so that type checkers see the same class with and without transformers.
_Cache: Any = cache_utils.Cache


class VMemCache(_Cache, MustClose):  # type: ignore[misc]  # a base that is Any
    """A cache for ``model.generate(cache=...)`` and for ``model.forward``.

        with VMemCache(model.config, max_batch_size=4, max_cache_len=4096) as cache:
            model.generate(**inputs, cache=cache)  # past_key_values=cache before 5.24

    The model generates the same tokens as with `DynamicCache`. A batch of n rows (batch size times
    beams) uses n slots. Heads, dtype and device are taken from the first keys; memory is allocated
    only then. Layers with a sliding window keep the window and, for the truncations of assisted
    generation, ``window_tile`` tokens before it. For MLA, if the model passes the latent to the
    cache, it is stored as one tensor per layer. Layers with linear attention, state spaces or short
    convolutions keep their state in the same slots, one row per request; such a cache cannot be
    cropped, so assisted generation cannot use it. Rows are written in place, and autograd records
    this as for a `StaticCache`: without ``torch.no_grad()``, results keep their inputs alive,
    including the cache's tensors. The cache can be reused after `reset`. If `close` is not called,
    memory is freed when the object is garbage-collected.

    Args:
        config: the model's configuration.
        max_batch_size: the maximum number of rows.
        max_cache_len: the maximum number of tokens per row, including prompt and answer. Addresses
            are reserved for the maximum; memory is mapped as rows grow.
        backend: as for `pyvmem.Context`; None: "host" for a model on the CPU, else "auto".
        context: a context to share; it must outlive the cache.
        budget: memory of that context to share with other caches, such as a draft model's
            (`drafting`); it must outlive the cache.
        contiguous: pass contiguous copies of all tokens to the model, at the cost of
            `DynamicCache`. Some code needs them because it calls `view`: a token's heads are
            adjacent in this cache, so `view` cannot merge batch and heads. None: copy only for
            model types in transformers that need it, and for code from the Hub
            (``trust_remote_code``), which cannot be checked. Pass False if code from the Hub needs
            no copies, and True if your own code needs them.
        **options: other fields of `pyvmem.KVCacheConfig`, such as ``page_size`` and
            ``memory_limit``.

    Raises:
        InvalidArgument: an option or back end is unknown, a value is out of range, ``group_size``
            does not divide the layers of each kind, or the configuration does not describe a
            layer's state.
        TypeError: `context` or `budget` has the wrong type.
        NotSupported: the model has an encoder, has layers with both a state and keys and values, or
            has no layer with keys and values.
    """

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int,
        *,
        backend: str | None = None,
        context: Context | None = None,
        budget: Budget | None = None,
        contiguous: bool | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config: expected a model's configuration, not {config!r:.80}")
        text = config.get_text_config(decoder=True)
        _check_layers(config, text)
        max_batch_size = bounded("max_batch_size", max_batch_size, 1, MOST_SLOTS, op="VMemCache")
        max_cache_len = bounded("max_cache_len", max_cache_len, 1, LONGEST, op="VMemCache")
        shapes = layer_shapes(text)
        check_arguments(options, GIVEN, shapes, context, backend, budget)
        if contiguous is None:
            contiguous = text.model_type in _VIEWED or any(
                type(one).__module__.startswith("transformers_modules.") for one in (config, text)
            )
        elif not isinstance(contiguous, bool):
            raise invalid(
                f"contiguous = {contiguous!r:.80}; expected True, False or None", op="VMemCache"
            )
        settings = Settings(
            text, max_batch_size, max_cache_len, backend, context, options, budget, contiguous
        )
        rows = Rows(settings)
        if not any(isinstance(shape, LayerShape) for shape in shapes):
            raise NotSupported("VMemCache: no layer has keys and values", op="VMemCache")
        layers: list[Any] = []
        for index, shape in enumerate(shapes):
            if isinstance(shape, EmptyShape):
                layers.append(VMemNothing(index))
            elif isinstance(shape, StateShape):
                layers.append(VMemState(rows, index))
            else:
                layers.append(VMemLayer(rows, index, shape.window))
        rows.layers = [
            one
            for one, shape in zip(layers, shapes, strict=True)
            if not isinstance(shape, EmptyShape)
        ]
        super().__init__(layers=layers)
        self._config = config
        self._rows = rows
        self._finalizer = when_collected(self, rows.close_quietly)

    @property
    def kvcache(self) -> KVCache | None:
        """The underlying cache, for its `stats` (do not step it); None before the first keys."""
        return self._rows.cache

    def __deepcopy__(self, memo: dict[int, Any]) -> VMemCache:
        """Returns an independent cache with the same tokens, to reuse a prompt."""
        settings = self._rows.settings
        other = VMemCache(
            self._config,
            settings.max_batch,
            settings.max_length,
            backend=settings.backend,
            context=settings.context,
            budget=settings.budget,
            contiguous=settings.contiguous,
            **settings.options,
        )
        memo[id(self)] = other
        for mine, its in zip(self._rows.layers, other._rows.layers, strict=True):
            its.take_from(mine)
        return other

    def close(self) -> None:
        """Frees memory and addresses. Idempotent. The cache cannot be used afterwards.

        Raises:
            Busy: tensors that `update` returned are still alive; drop them and call `close` again.
                The cache's contents are dropped regardless.
        """
        self._rows.close()
        self._finalizer.detach()


@contextmanager
def drafting(assistant: Any, cache: VMemCache) -> Iterator[None]:
    """Makes a draft model keep its keys and values in `cache` inside the ``with`` block.

        with drafting(draft, draft_cache):
            model.generate(**inputs, assistant_model=draft, cache=cache)

    ``generate`` always creates the draft model's cache itself, so the draft model is patched to use
    `cache`, which is emptied first. The target model's cache is passed as usual. If both caches
    share a `Budget`, each can use the memory that the other does not need.
    """
    original = assistant._prepare_cache_for_generation

    def prepare(
        generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        if model_kwargs.get(CACHE) is None:
            cache.reset()
            model_kwargs[CACHE] = cache
        return original(generation_config, model_kwargs, *more, **named)

    assistant._prepare_cache_for_generation = prepare
    try:
        yield
    finally:
        del assistant._prepare_cache_for_generation


def _check_layers(config: Any, text: Any) -> None:
    """Rejects models that this cache does not support, such as those with an encoder."""
    served = ATTENTION | {"chunked_attention", *NO_ATTENTION}
    kinds = set(getattr(text, "layer_types", None) or ()) - served
    what = ""
    if kinds:
        what = f"layers of kind {', '.join(sorted(kinds))}"
    elif getattr(config, "is_encoder_decoder", False):
        what = "an encoder and cross-attention"
    if what:
        raise NotSupported(f"VMemCache: the model has {what}", op="VMemCache")
