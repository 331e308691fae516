# SPDX-License-Identifier: MIT
"""Hooks into the manager, cache and attention of transformers' continuous batching.

transformers has a registry for attention functions, which this module uses, but not for caches: a
manager looks up ``PagedAttentionCache`` in the module ``continuous_api`` when it creates its cache.
While the plug-in is installed, that name and ``ContinuousBatchingManager`` are replaced in that
module. Managers of other models work as before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.generation.continuous_batching import continuous_api

from pyvmem.errors import NotSupported
from pyvmem.hf.cb_options import (
    Options,
    adjust,
    check_attention,
    request_limits,
)
from pyvmem.hf.latent import UP, absorbed
from pyvmem.hf.named import NamedRequests
from pyvmem.hf.shapes import plain_scores
from pyvmem.plumbing.validation import invalid

__all__ = ["ATTENTION", "patch", "unpatch"]

ATTENTION = "vmem"  # the plug-in's name in transformers' attention registry

_api: Any = continuous_api
_Manager: Any = _api.ContinuousBatchingManager
_StockCache: Any = _api.PagedAttentionCache

# `_building.cache` creates the cache of the manager that is being built, if that is one of ours.
_building = threading.local()
_options_for: Callable[[Any], Options | None] | None = None
_slot_cache: Any = None


def _make_cache(*args: Any, **kwargs: Any) -> Any:
    """Replaces the constructor of `PagedAttentionCache`."""
    make = getattr(_building, "cache", None)
    return _StockCache(*args, **kwargs) if make is None else make(*args, **kwargs)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention over the slots; called by transformers.

    Takes queries ``[1, heads, tokens, head_dim]`` and returns ``[1, tokens, ...]``.

    Raises:
        NotSupported: the cache is not this plug-in's, an argument changes the scores (see
            `plain_scores`), or the window differs from the configuration's.
    """
    cache = kwargs.get("cache")
    if not isinstance(cache, _slot_cache):
        raise NotSupported(
            f"attention {ATTENTION!r} works only in continuous batching; the model goes back to "
            "its own when the manager stops",
            op=ATTENTION,
        )
    plain_scores(ATTENTION, kwargs)
    layer: Any = module.layer_idx
    asked, window = kwargs.get("sliding_window"), cache.requests.window(layer)
    if asked is not None and asked != window:
        raise NotSupported(
            f"layer {layer} uses a window of {asked}, but its configuration has {window}",
            op=ATTENTION,
        )
    q, k, v = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
    return cache.requests.attend(layer, q, k, v, scaling, kwargs.get(UP)).unsqueeze(0), None


def _guard(scheduler: Any, requests: NamedRequests) -> None:
    """Makes a scheduler reject requests that can never fit in memory.

    Otherwise transformers would run out of requests to preempt and abort all requests. A
    request without a limit on new tokens finishes when its slot or all memory is full.
    """
    add, longest = scheduler.add_waiting_request, requests.longest()

    def checked(state: Any) -> None:
        prompt = len(state.initial_tokens)
        if state.max_new_tokens is None:
            state.max_new_tokens = max(1, longest - prompt)
            state.__post_init__()  # resolves max_new_tokens
        if prompt + max(0, state.max_new_tokens) > longest:
            raise invalid(
                f"{prompt} prompt tokens and {state.max_new_tokens} new tokens exceed the "
                f"{longest} tokens that memory can hold",
                limit=longest,
                op="vmem_continuous_batching",
            )
        # Each answer to a forked prompt recomputes the prompt's last token. With a prompt of one
        # token, the prompt's own batch would be empty, which would abort all requests.
        alone = state.num_children if prompt == 1 else 0
        state.num_children -= alone
        add(state)
        for number in range(alone):
            answer = state.create_equivalent_initial_request()
            # transformers names forks like this
            answer.request_id = f"{state.request_id}__child#{number}"
            add(answer)

    scheduler.add_waiting_request = checked


def _adapters(model: Any) -> tuple[str, ...] | None:
    """Returns the names of a model's active adapters, or None if it has no adapters."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return None
    return tuple(model.active_adapters())


class VMemManager(_Manager):  # type: ignore[misc]  # a base that is Any
    """transformers' manager, which uses slots if the plug-in is installed for the model."""

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        self._vmem = None if _options_for is None else _options_for(model)
        if self._vmem is not None:
            _slot_cache.check(self._vmem, model.config.get_text_config())
            check_attention(model)
            continuous_batching_config = copy.deepcopy(continuous_batching_config)
            adjust(continuous_batching_config)
        self._absorbed = ExitStack()  # closing it restores the modules' own `forward`
        self._vmem_cache: Any = None
        try:
            super().__init__(model, generation_config, continuous_batching_config, workload_hints)
        except BaseException:
            self._give_attention_back(model)
            raise

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Installs the plug-in's attention in the model until the manager stops."""
        if self._vmem is None:
            super().switch_to_cb_friendly_attn(model, *args, **kwargs)
            return
        original = model.config._attn_implementation
        if original != ATTENTION:
            self._absorbed.enter_context(absorbed(model))
            model.set_attn_implementation(ATTENTION)
            self._original_attn_impl = original

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Adds a request as transformers does, but rejects it if no slot can hold it.

        Without a limit on new tokens, a request finishes when its slot or all memory is full. If a
        request does not fit in memory, only that request fails, with an error in its result.

        Raises:
            InvalidArgument: prompt and new tokens together exceed ``max_seq_len``, or the prompt
                is empty. (Either would kill the thread that serves all requests.)
        """
        if self._vmem is not None:
            if not len(input_ids):
                raise invalid("the prompt is empty", op="vmem_continuous_batching")
            config = self.model.config.get_text_config()
            longest = request_limits(self._vmem, config, self.continuous_batching_config)[1]
            new = max_new_tokens
            if new is None:
                new = self.generation_config.max_new_tokens
            new = 1 if new is None else new
            if len(input_ids) + max(0, new) > longest:
                raise invalid(
                    f"{len(input_ids)} prompt tokens and {new} new tokens exceed max_seq_len "
                    f"{longest}, an argument of install",
                    limit=longest,
                    op="vmem_continuous_batching",
                )
        return super().add_request(input_ids, request_id, max_new_tokens, *args, **kwargs)

    def _create_batch_processor(self) -> Any:
        if self._vmem is None or self.batch_processor is not None:
            return super()._create_batch_processor()
        options = self._vmem
        # a failed start has already restored the model's own attention
        self.switch_to_cb_friendly_attn(self.model)

        def make(*args: Any, **kwargs: Any) -> Any:
            self._vmem_cache = _slot_cache(options, *args, **kwargs)
            return self._vmem_cache

        _building.cache = make
        try:
            processor = super()._create_batch_processor()
        except BaseException:
            self._close_cache()
            self._give_attention_back(self.model)
            raise
        finally:
            _building.cache = None
        _guard(processor.scheduler, self._vmem_cache.requests)
        self._vmem_cache.requests.namespace = lambda: _adapters(self.model)
        self._vmem_cache.requests.stream = processor.inputs_and_outputs.compute_stream
        return processor

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops as transformers does, and frees all memory unless the manager is kept."""
        super().stop(*args, **kwargs)
        self._leave(self.model)
        if self.batch_processor is None:
            self._close_cache()

    def destroy(self) -> None:
        """Destroys the manager as transformers does, and frees all memory."""
        super().destroy()
        self._leave(self.model)
        self._close_cache()

    def _give_attention_back(self, model: Any) -> None:
        """Restores the model's attention, as `stop` does, if the manager fails to start."""
        if self._original_attn_impl is not None:
            model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None
        self._leave(model)

    def _leave(self, model: Any) -> None:
        if model.config._attn_implementation != ATTENTION:
            self._absorbed.close()

    def _close_cache(self) -> None:
        # A thread that did not finish in time may still be using the cache, which is then freed
        # along with the manager.
        if not self.is_running() and self._vmem_cache is not None:
            cache, self._vmem_cache = self._vmem_cache, None
            self.batch_processor = None
            cache.requests.close()


def patch(options_for: Callable[[Any], Options | None], slot_cache: Any) -> None:
    """Patches transformers.

    Args:
        options_for: a function that returns a model's options, or None if the plug-in is not
            installed for the model.
        slot_cache: the cache class for this version of transformers.
    """
    global _options_for, _slot_cache
    _options_for, _slot_cache = options_for, slot_cache
    disable: Any = torch.compiler.disable  # lengths are lists, which torch.compile does not support
    AttentionInterface.register(ATTENTION, disable(_attention))
    _api.ContinuousBatchingManager = VMemManager
    _api.PagedAttentionCache = _make_cache


def unpatch() -> None:
    """Removes the patches. Existing managers are not affected."""
    _api.ContinuousBatchingManager = _Manager
    _api.PagedAttentionCache = _StockCache
