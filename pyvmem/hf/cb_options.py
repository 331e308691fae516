# SPDX-License-Identifier: MIT
"""Options for continuous batching on virtual memory, and the creation of a model's cache."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pyvmem.attention.kernels import KERNELS
from pyvmem.errors import NotSupported
from pyvmem.hf.latent import latent_rank
from pyvmem.hf.named import NamedRequests
from pyvmem.hf.rows import GIVEN
from pyvmem.hf.shapes import row_shapes
from pyvmem.kvcache import KVCacheConfig, LayerShape
from pyvmem.kvcache.budget import free_bytes
from pyvmem.kvcache.config import AHEAD_TOKENS, LONGEST, MOST_SLOTS
from pyvmem.kvcache.layered_cache import cache_of, check_arguments
from pyvmem.memory.context import Context
from pyvmem.models.hf_config import plain_rows
from pyvmem.plumbing.validation import bounded, invalid, switched

__all__ = [
    "MAX_SLOTS",
    "Options",
    "adjust",
    "check_attention",
    "check_model",
    "kept_shapes",
    "make_requests",
    "request_limits",
]

_log = logging.getLogger("pyvmem.hf")

MAX_SLOTS = 256  # our default; transformers' default is 1024 requests per batch


@dataclass(frozen=True)
class Options:
    """The options of `pyvmem.hf.continuous.install`, which are checked on construction.

    Attributes:
        max_batch: number of slots; None: `max_requests_per_batch`, at most `MAX_SLOTS`.
        max_seq_len: tokens per slot; None: the model's `max_position_embeddings`.
        kernel: attention kernel.
        backend: as for `pyvmem.Context`; None: "host" for a model on the CPU, else "auto".
        context: a context to share; None: the cache opens and owns one.
        keep_windows: whether to keep rows that have left a sliding window. If true, a prefix can
            end at any token; otherwise, only where a window was recorded.
        kvcache: other fields of `KVCacheConfig`.
    """

    max_batch: int | None = None
    max_seq_len: int | None = None
    kernel: str = "auto"
    backend: str | None = None
    context: Context | None = None
    keep_windows: bool = False
    kvcache: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("max_batch", MOST_SLOTS), ("max_seq_len", LONGEST)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(
                    self, name, bounded(name, value, 1, most, op="vmem_continuous_batching")
                )
        if self.kernel != "auto" and self.kernel not in KERNELS:
            raise invalid(
                f"kernel must be one of auto, {', '.join(KERNELS)}, not {self.kernel!r}",
                op="vmem_continuous_batching",
            )
        object.__setattr__(
            self,
            "keep_windows",
            switched("keep_windows", self.keep_windows, op="vmem_continuous_batching"),
        )
        self.check()

    def check(self, layers: Sequence[LayerShape] = ()) -> None:
        """Checks the options against `layers`, or, without layers, only against general rules."""
        check_arguments(self.kvcache, GIVEN, layers, self.context, self.backend)


def check_model(config: Any, tensor_parallel: int = 1) -> None:
    """Rejects models unless every layer stores only keys and values, or a latent.

    transformers' own continuous batching also supports only full and sliding attention
    (``ATTN_TYPE_TO_ALLOCATOR`` in its ``cache.py``): its batch is a single row with all requests'
    tokens, and a stateful layer would mix the requests.

    Raises:
        NotSupported: the model has states, chunked attention, layers that share keys or capped
            scores, or is split across devices.
    """
    plain_rows(config, "continuous batching over virtual memory")
    if tensor_parallel > 1:
        raise NotSupported(
            "continuous batching over virtual memory: the model is split over "
            f"{tensor_parallel} devices",
            op="continuous batching",
        )


def check_attention(model: Any) -> None:
    """Rejects models with their own attention code, which would mix a batch's requests.

    Raises:
        NotSupported: the class does not declare that it uses transformers' attention registry
            (``_supports_attention_backend``).
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise NotSupported(
            f"continuous batching over virtual memory: {type(model).__name__} has its own "
            "attention code; it does not use transformers' AttentionInterface",
            op="continuous batching",
        )


def adjust(cb_config: Any) -> None:
    """Switches off, in place, options that do not apply to slots or are unsupported.

    Warns once per process about those that the user set. The decode fast path, a paged kernel, is
    switched off silently.
    """
    cb_config.max_blocks_per_request = 0
    graphs, space = cb_config.use_cuda_graph, cb_config.cpu_offload_space
    for name, asked, off, why in (
        (
            "use_cuda_graph",
            any(graphs) if isinstance(graphs, tuple) else bool(graphs),
            False,
            "attention over slots reads the lengths on the host; a graph replays fixed lengths",
        ),
        (
            "use_async_batching",
            bool(cb_config.use_async_batching),
            False,
            "it has no benefit without CUDA graphs",
        ),
        (
            "cpu_offload_space",
            space is None or space > 0,
            0.0,
            "it copies blocks by number; preempted requests are recomputed",
        ),
    ):
        if asked:
            _warn_once(
                f"ContinuousBatchingConfig.{name}={getattr(cb_config, name)!r} is switched off "
                f"over virtual memory: {why}"
            )
        setattr(cb_config, name, off)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def request_limits(options: Options, config: Any, cb_config: Any) -> tuple[int, int]:
    """Returns the number of slots and their length in tokens, for a resolved configuration.

    Raises:
        InvalidArgument: the configuration does not give a maximum sequence length.
    """
    slots = options.max_batch or min(cb_config.max_requests_per_batch or MAX_SLOTS, MAX_SLOTS)
    longest = options.max_seq_len or getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise invalid(
            f"{type(config).__name__} has no max_position_embeddings; pass max_seq_len",
            op="vmem_continuous_batching",
        )
    return slots, longest


def kept_shapes(options: Options, config: Any) -> list[LayerShape]:
    """Returns the layer shapes of a model under the installed options.

    Raises:
        InvalidArgument: the configuration does not describe the layers.
        NotSupported: a layer is stateful.
    """
    shapes = row_shapes(config, "continuous batching")
    if options.keep_windows:
        shapes = [dataclasses.replace(shape, window=0) for shape in shapes]
    return shapes


def make_requests(
    options: Options,
    config: Any,
    cb_config: Any,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    logits_of_all: bool,
) -> NamedRequests:
    """Creates the cache for a model and the `NamedRequests` on it.

    Args:
        options: the installed options.
        config: configuration of the text model.
        cb_config: transformers' ``ContinuousBatchingConfig``, resolved.
        block_tokens: tokens per block, the unit of ``num_blocks``.
        device, dtype: the model's device and dtype.
        logits_of_all: whether the model computes logits for every token of a batch, rather than for
            the last token of each request, so that memory must be reserved for them.

    Raises:
        InvalidArgument: the model or the context does not support a value.
        NotSupported: a layer is stateful.
    """
    slots, longest = request_limits(options, config, cb_config)
    windows = [shape.window for shape in row_shapes(config, "continuous batching")]
    shapes = kept_shapes(options, config)
    policy = {
        "dtype": dtype,
        "max_batch": slots,
        "max_seq_len": longest,
        "ahead_tokens": AHEAD_TOKENS,
        **options.kvcache,
    }
    checked = KVCacheConfig(1, 1, 1, **{**policy, "group_size": 1})
    token_bytes = checked.itemsize * sum(map(_elements, shapes))
    ordinal = None if device.type == "cpu" else device.index or 0
    backend = options.backend or ("host" if ordinal is None else "auto")
    if not checked.memory_limit:
        if cb_config.num_blocks is not None:
            limit = cb_config.num_blocks * block_tokens * token_bytes
        else:
            limit = int(_free(options.context, backend, ordinal) * cb_config.max_memory_percent)
            limit -= _batch_bytes(config, cb_config, checked, logits_of_all)
        policy["memory_limit"] = max(1, limit)
    cache = cache_of(shapes, options.context, backend, ordinal or 0, **policy)
    try:
        if cache.context.cuda_device != ordinal:
            raise invalid(
                f"the model is on {device}, but back end {cache.context.info.backend} is on "
                f"CUDA device {cache.context.cuda_device}",
                op="vmem_continuous_batching",
            )
        return NamedRequests(
            cache,
            options.kernel,
            cb_config.allow_block_sharing,
            windows,
            latent_rank(config),
        )
    except BaseException:
        cache.close()
        raise


def _free(context: Context | None, backend: str, ordinal: int | None) -> int:
    """Returns the bytes available to a cache in `context`, or in a new context if None."""
    if context is not None:
        return free_bytes(context)
    with Context(backend, device=ordinal or 0) as opened:
        return free_bytes(opened)


def _elements(shape: LayerShape) -> int:
    """Returns the number of elements per token in a layer."""
    return shape.num_kv_heads * (shape.head_dim + (shape.v_head_dim or 0))


def _batch_bytes(config: Any, cb_config: Any, shape: KVCacheConfig, logits_of_all: bool) -> int:
    """Estimates the bytes that a forward pass needs in addition to weights and cache."""
    tokens = cb_config.max_batch_tokens or 8192
    rows = tokens if logits_of_all else shape.max_batch
    scores = rows * config.vocab_size * 4
    return int(scores + tokens * 16 * config.hidden_size * shape.itemsize)
