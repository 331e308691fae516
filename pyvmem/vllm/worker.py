# SPDX-License-Identifier: MIT
"""The worker: KV tensors on elastic memory, and the last step that uses each page.

`ElasticGPUWorker` and `ElasticCPUWorker` are vLLM's workers with `ElasticWorker` mixed in. They are
created on first use, since importing one breaks the other's platform.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from pyvmem.elastic.choice import SMALL, choose_page
from pyvmem.elastic.geometry import blocks_are_outermost, runs_of
from pyvmem.elastic.memory import KVMemory, device_total, open_context
from pyvmem.elastic.settings import Settings
from pyvmem.errors import VMemError
from pyvmem.ledger.accounts import device_of, engines_in
from pyvmem.plumbing.units import format_bytes
from pyvmem.vllm import offload
from pyvmem.vllm.channel import Server, new_address
from pyvmem.vllm.reach import LOCAL, Place, machine

__all__ = ["ElasticWorker"]

_MARGIN = 512 << 20
_PATIENCE = 30.0  # seconds for the scheduler to give back what a sleeping rank has mapped

log = logging.getLogger("vllm.vmem")


class ElasticWorker:
    """The methods that override those of a vLLM worker."""

    vllm_config: Any
    cache_config: Any
    model_runner: Any
    device: Any
    rank: int

    _memory: KVMemory | None = None
    _server: Server | None = None
    _answers: Any = None
    _lend: Any = None
    _others = _step = 0

    # ---- start -----------------------------------------------------------------------------------

    def init_device(self) -> None:
        """vLLM's, without requiring that the memory of the whole cache be free now."""
        self._settings = Settings.read()
        cache = self.cache_config
        asked, cache.gpu_memory_utilization = cache.gpu_memory_utilization, 1e-6
        try:
            super().init_device()  # type: ignore[misc]
        finally:
            cache.gpu_memory_utilization = asked
        if self.device.type == "cuda":
            import torch

            device_of(torch.cuda.get_device_name(self.device), "")  # refused before weights load
        self._others = self._count_others()
        if hasattr(self, "requested_memory"):
            total = self.init_snapshot.total_memory  # type: ignore[attr-defined]
            self.requested_memory = int(total * asked)

    def _count_others(self) -> int:
        """Memory that other engines have on this GPU, by its ledger."""
        if self.device.type != "cuda" or self._settings.ledger is None:
            return 0
        import torch

        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        try:
            ledgers = engines_in(self._settings.folder)
        except VMemError:  # which the scheduler reports when it joins
            return 0
        return sum(one.used for name in ledgers if uuid in name for one in ledgers[name])

    def determine_available_memory(self) -> Any:
        """vLLM's, by what is free now and was free at the start.

        That is corrected by what other engines have taken and given back meanwhile.
        """
        if back := self._others - self._count_others():
            snapshot = self.init_snapshot  # type: ignore[attr-defined]
            snapshot.free_memory += back
            snapshot.cuda_memory -= back
            snapshot.non_torch_memory -= back
        return super().determine_available_memory()  # type: ignore[misc]

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """Returns the context that KV tensors come from; in sleep mode, the weights' pool."""
        if tag == "kv_cache" and self._answers is not None:
            return self._answers
        if not self.vllm_config.model_config.enable_sleep_mode:
            return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        if tag != "weights":
            return nullcontext()
        from pyvmem.vllm.sleep import loading_weights

        return loading_weights(self._settings, self.device.index or 0)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """vLLM's, with the pool's KV tensors."""
        from pyvmem.vllm.allocation import place, wary_backends

        offload.clear()
        offload.count_by(self.vllm_config, kv_cache_config)
        wary = [] if self._settings.visible else wary_backends(self.vllm_config, kv_cache_config)
        if wary and self.device.type == "cuda":
            log.info("vmem: KV tensors have addresses that CUDA knows, for %s", ", ".join(wary))
            self._settings = dataclasses.replace(self._settings, visible=True)
        kv_cache_config, self._answers = place(kv_cache_config, self._open)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._answers.check()
        self._answers = None
        if self._memory is not None:
            self._check_layout(self._memory)
            offload.begin(self._memory, self.device)

    def _check_layout(self, memory: KVMemory) -> None:
        for view in _views(self.model_runner.kv_caches):
            shape, strides = tuple(view.shape), view.stride()
            if not blocks_are_outermost(shape, strides, view.element_size(), memory.geometry):
                raise NotImplementedError(
                    "VMEM_VLLM=1 does not work with this attention back end: its KV cache of "
                    f"shape {shape}, strides {strides}, does not keep a block's bytes together"
                )

    def _open(self, num_blocks: int, sizes: Sequence[int]) -> KVMemory:
        """Memory for this many blocks, in tensors of these sizes; maps the null block."""
        settings, gpu = self._settings, self.device.type == "cuda"
        device = self.device.index or 0 if gpu else None
        most = min(sum(sizes), settings.limit or sum(sizes), device_total(device))
        page, why = choose_page(num_blocks, sizes, most, settings.page_size, settings.limit)
        if self.rank == 0:
            log.info("vmem: %d KV tensors on pages of %s: %s", len(sizes), format_bytes(page), why)
        context = open_context(
            settings.backend or ("auto" if gpu else "host"),
            device or 0,
            page if page != SMALL or settings.page_size else 0,  # the back end's smallest
            settings.reserve if settings.reserve is not None else 256 << 20,
        )
        memory = self._memory = KVMemory(context, num_blocks, sizes, visible=settings.visible)
        # For a worker that is never shut down: ``del llm``.
        weakref.finalize(self, memory.close).atexit = False
        memory.grow(
            runs_of([memory.geometry.pages(k, 0) for k in range(len(memory.geometry.classes))])
        )
        return memory

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's; the blocks used for warm-up are backed during the call."""
        memory = self._memory
        with ExitStack() as stack:
            if memory is not None:
                self._lend = stack.enter_context(memory.lent())
                stack.enter_context(_states_lent(self.model_runner, self._lend))
            try:
                result = super().compile_or_warm_up_model()  # type: ignore[misc]
            finally:
                self._lend = None
        if memory is not None:
            memory.headroom = self._headroom()
            address = new_address(self._settings)
            LOCAL[address] = memory
            self._server = Server(address, memory)
        return result

    def vmem_place(self) -> Place | None:
        """The location of this rank for the scheduler; None: it has no KV tensors."""
        if self._server is None:
            return None
        return Place(machine(self._settings), self._server.address)

    def vmem_listen(self, scheduler: str) -> tuple[str, int, str] | None:
        """`Server.listen`, unless the scheduler is on this machine."""
        if self._server is None or machine(self._settings) == scheduler:
            return None
        from vllm.utils.network_utils import get_ip

        return self._server.listen(get_ip())

    def _headroom(self) -> int:
        """Memory that torch may still allocate: the peak so far, and a margin."""
        if self.device.type != "cuda":
            return 0
        import torch

        peak = torch.cuda.max_memory_allocated(self.device)
        return max(0, peak - torch.cuda.memory_reserved(self.device)) + _MARGIN

    # ---- steps -----------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """vLLM's, after the step's pages are mapped and before it is marked as launched."""
        memory = self._memory
        if memory is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        stream: Any = None
        if self.device.type == "cuda":
            import torch

            stream = torch.cuda.current_stream(self.device)
        memory.step_begins(stream)
        orders = getattr(scheduler_output, "vmem", None)
        if orders is not None:
            self._step = orders.step
            offload.drop(orders.dropped)
            if scheduler_output.kv_cache_block_copies:
                memory.fence()
            for number, runs in orders.releases:
                memory.release(number, runs, orders.step - 1)
            if orders.moves:
                memory.copy(orders.moves)
        elif self._lend is not None:
            self._lend(_blocks_named(scheduler_output))
        elif scheduler_output.total_num_scheduled_tokens:
            raise RuntimeError(
                "a step of another scheduler than pyvmem's: its blocks have no memory"
            )
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if output is not None or not scheduler_output.total_num_scheduled_tokens:
            memory.step_ends(self._step)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; the last part of a step that launches work."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._memory is not None:
            self._memory.step_ends(self._step)
        return output

    def execute_dummy_batch(self) -> None:
        """vLLM's: a rank without requests runs a dummy batch on the null block.

        The V2 runner of 0.26 leaves blocks of finished requests in its tables.
        """
        tables = getattr(self.model_runner, "block_tables", None)
        for table in tables.input_block_tables if tables is not None else ():
            table.zero_()
        super().execute_dummy_batch()  # type: ignore[misc]

    def sleep(self, level: int = 1) -> None:
        """vLLM's; also frees the KV cache's memory.

        It is already free unless the caller bypassed the scheduler, as verl does.
        """
        super().sleep(level)  # type: ignore[misc]
        self._rest()

    def discard(self, tags: tuple[str, ...]) -> None:
        """vLLM's, for memory that its back end puts to sleep; also frees the KV cache's memory."""
        if tags != ("kv_cache",) or self.vllm_config.model_config.enable_sleep_mode:
            super().discard(tags)  # type: ignore[misc]
        self._rest()

    def _rest(self) -> None:
        if self._memory is not None and not self._memory.rest(_PATIENCE):
            log.warning("vmem: a sleeping worker still has the memory of its KV cache")

    def shutdown(self) -> None:
        """vLLM's, then frees the memory."""
        server, self._server = self._server, None
        if server is not None:
            LOCAL.pop(server.address, None)
            server.close()
        super().shutdown()  # type: ignore[misc]
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


@contextmanager
def _states_lent(runner: Any, lend: Callable[[Sequence[int]], None]) -> Iterator[None]:
    """Backs, for the duration of a call, blocks that the V2 runner uses outside a step.

    Since 0.31 it warms up the kernels of layers with a state that way.
    """
    prepare = getattr(runner, "prepare_dummy_attn", None)
    if prepare is None:
        yield
        return

    def prepare_dummy_attn(input_batch: Any, valid_state_slots: bool = False) -> Any:
        if valid_state_slots:
            lend(range(1, input_batch.num_reqs + 1))
            return prepare(input_batch, valid_state_slots)
        return prepare(input_batch)

    runner.prepare_dummy_attn = prepare_dummy_attn
    try:
        yield
    finally:
        del runner.prepare_dummy_attn


def _views(kv_caches: Iterable[Any]) -> Iterator[Any]:
    """The tensors of all layers; before 0.28 a layer with a state has a list of tensors."""
    for one in kv_caches:
        yield from one if isinstance(one, list | tuple) else (one,)


def _blocks_named(scheduler_output: Any) -> list[int]:
    """All blocks that a step accesses for the first time."""
    named: list[int] = []
    for request in scheduler_output.scheduled_new_reqs:
        for group in request.block_ids:
            named += group
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in groups or ():
            named += group
    return named


_BASES = {
    "ElasticGPUWorker": ("vllm.v1.worker.gpu_worker", "Worker"),
    "ElasticCPUWorker": ("vllm.v1.worker.cpu_worker", "CPUWorker"),
}
_making = threading.Lock()


def __getattr__(name: str) -> Any:
    if name not in _BASES:
        raise AttributeError(name)
    with _making:
        if name not in globals():
            module, base = _BASES[name]
            bases = (ElasticWorker, getattr(importlib.import_module(module), base))
            globals()[name] = type(name, bases, {"__module__": __name__})
    return globals()[name]
