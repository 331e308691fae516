# SPDX-License-Identifier: MIT
"""transformers' continuous batching with each request contiguous in virtual memory.

    with vmem_continuous_batching(model, max_batch=64):
        model.generate_batch(inputs, generation_config)

transformers' own cache is paged: attention gathers all tokens of every request into one tensor, or
calls a paged kernel. Here, a request is a slot of a `pyvmem.KVCache`, and the kernels of
`pyvmem.attention` read it in place. transformers' scheduler, sampling and server are unchanged:
chunked prefill, prefix sharing, parallel sampling, and preemption by recomputation work as before.
CUDA graphs, asynchronous batching and offloading to the host are switched off, with a warning if
they were requested. If a request does not fit in memory, only that request fails; transformers
would abort all requests.

Only the transformers versions in `CHECKED` are supported.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyvmem.errors import NotSupported
from pyvmem.hf.cb_options import Options, check_attention
from pyvmem.kvcache import KVCache
from pyvmem.memory.context import Context
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.plumbing.validation import invalid

__all__ = ["CHECKED", "install", "kvcache_of", "uninstall", "vmem_continuous_batching"]

#: The supported transformers versions and the cache for each.
CHECKED = {
    "5.17": "pyvmem.hf.cb_5_17",
    **{f"5.{minor}": "pyvmem.hf.cb_5_18" for minor in range(18, 25)},
}

_lock = reentrant_lock()
_models: weakref.WeakKeyDictionary[Any, Options] = weakref.WeakKeyDictionary()
_default: Options | None = None


def _adapter() -> Any:
    """Returns the cache class for the installed version of transformers."""
    import transformers

    version = transformers.__version__
    module = CHECKED.get(".".join(version.split(".")[:2]))
    if module is None:
        raise NotSupported(
            f"transformers {version}: continuous batching over virtual memory was checked only "
            f"with {', '.join(CHECKED)}, and its internals change from release to release",
            op="continuous batching",
        )
    return importlib.import_module(module).SlotCache


def _options_for(model: Any) -> Options | None:
    return _models.get(model, _default)


def install(
    model: Any = None,
    *,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    kernel: str = "auto",
    backend: str | None = None,
    context: Context | None = None,
    keep_windows: bool = False,
    **kvcache_options: Any,
) -> None:
    """Makes continuous batching use this cache. Call it again to change options.

    Existing managers are not affected.

    Args:
        model: the model to serve; None: every model in the process (an unsupported model is then
            rejected when its continuous batching starts).
        max_batch: number of slots, the maximum number of running requests; None:
            ``ContinuousBatchingConfig.max_requests_per_batch``, at most 256.
        max_seq_len: tokens per slot, which determines the reserved addresses; None: the model's
            ``max_position_embeddings``. A longer request is rejected when it is added.
        kernel: see `pyvmem.attention.Attention`.
        backend: as for `pyvmem.Context`; None: "host" for a model on the CPU, else "auto".
        context: a context to share; it must outlive the managers.
        keep_windows: keep all rows of layers with a sliding window, so that a recorded prompt
            matches every prompt with the same beginning. These layers then need as much memory as
            full attention. If False, a prompt matches only where the window at the end of the match
            was recorded.
        **kvcache_options: other fields of `pyvmem.KVCacheConfig`. ``memory_limit`` defaults to
            ``num_blocks`` blocks of the ``ContinuousBatchingConfig``, if set, or else to the memory
            that ``max_memory_percent`` allows.

    Raises:
        InvalidArgument: an option or value is unknown, ``group_size`` does not divide the model's
            layers of each kind, or the model has a persistent manager (destroy it with
            ``destroy_cached_continuous_batching_manager``).
        TypeError: `context` has the wrong type.
        NotSupported: this version of transformers is not supported; the model's attention is not
            plain causal attention with optional windows (for example capped scores, chunks, shared
            layers, states) or cannot be replaced in transformers; or, with transformers 5.17, the
            model's layers differ.
    """
    global _default
    options = Options(
        max_batch, max_seq_len, kernel, backend, context, keep_windows, kvcache_options
    )
    slot_cache = _adapter()
    if model is not None:
        slot_cache.check(options, model.config.get_text_config())
        check_attention(model)
        if getattr(model, "_cached_continuous_batching_manager", None) is not None:
            raise invalid(
                "the model still has a persistent continuous-batching manager; call "
                "destroy_cached_continuous_batching_manager first",
                op="vmem_continuous_batching",
            )
    from pyvmem.hf import cb_manager

    with _lock:
        if model is None:
            _default = options
        else:
            _models[model] = options
        cb_manager.patch(_options_for, slot_cache)


def uninstall(model: Any = None) -> None:
    """Reverts `install` for a model; does nothing if the plug-in is not installed."""
    global _default
    with _lock:
        if model is None:
            _default = None
        else:
            _models.pop(model, None)
        if _default is None and not _models:
            from pyvmem.hf import cb_manager

            cb_manager.unpatch()


@contextmanager
def vmem_continuous_batching(model: Any = None, **options: Any) -> Iterator[None]:
    """Applies `install` for the duration of a ``with`` block. The arguments are the same."""
    install(model, **options)
    try:
        yield
    finally:
        uninstall(model)


def kvcache_of(manager: Any) -> KVCache | None:
    """Returns a manager's KV cache, for its `stats`; None until the manager has created it."""
    cache = getattr(manager, "_vmem_cache", None)
    return None if cache is None else cache.requests.kvcache
