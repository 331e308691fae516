# SPDX-License-Identifier: MIT
"""vLLM's workers, with KV tensors on elastic memory.

`ElasticGPUWorker` and `ElasticCPUWorker` are vLLM's workers with the mixin `ElasticWorker`. Each
class is created on first use, since importing vLLM's worker for another platform fails.
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
from pyvmem.vllm.rank_discovery import LOCAL, RankAddress, machine

__all__ = ["ElasticWorker"]

_MARGIN = 512 << 20  # bytes of GPU memory kept free for activations beyond their peak so far
_PATIENCE = 30.0  # seconds that a sleeping rank waits for the scheduler to free its KV memory

log = logging.getLogger("vllm.vmem")


class ElasticWorker:
    """A mixin for vLLM's workers; the worker class must follow it in the MRO.

    Each worker process has one instance.
    """

    vllm_config: Any
    cache_config: Any
    model_runner: Any
    device: Any
    rank: int

    _memory: KVMemory | None = None
    _server: Server | None = None
    _tensor_mode: Any = None
    _lend: Any = None
    _others = _step = 0

    # ---- start -----------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Initializes the device, even if there is not enough free memory for the whole KV cache.

        Overrides `Worker.init_device`.
        """
        self._settings = Settings.read()
        cache = self.cache_config
        asked, cache.gpu_memory_utilization = cache.gpu_memory_utilization, 1e-6
        try:
            super().init_device()  # type: ignore[misc]
        finally:
            cache.gpu_memory_utilization = asked
        if self.device.type == "cuda":
            import torch

            # Raises on a MIG instance, before the weights are loaded.
            device_of(torch.cuda.get_device_name(self.device), "")
        self._others = self._count_others()
        if hasattr(self, "requested_memory"):
            total = self.init_snapshot.total_memory  # type: ignore[attr-defined]
            self.requested_memory = int(total * asked)

    def _count_others(self) -> int:
        """Returns how many bytes other engines hold on this GPU, according to the ledger.

        Returns 0 on a CPU, or if there is no ledger or it cannot be read.
        """
        if self.device.type != "cuda" or self._settings.ledger is None:
            return 0
        import torch

        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        try:
            ledgers = engines_in(self._settings.folder)
        except VMemError:  # ignored: the scheduler reports it when it joins the ledger
            return 0
        return sum(one.used for name in ledgers if uuid in name for one in ledgers[name])

    def determine_available_memory(self) -> Any:
        """Returns the number of bytes for the KV cache, which vLLM derives from free memory.

        vLLM compares free memory now with free memory at the start. We correct the difference for
        the bytes that other engines allocated or freed in between. Overrides
        `Worker.determine_available_memory`.
        """
        if back := self._others - self._count_others():
            snapshot = self.init_snapshot  # type: ignore[attr-defined]
            snapshot.free_memory += back
            snapshot.cuda_memory -= back
            snapshot.non_torch_memory -= back
        return super().determine_available_memory()  # type: ignore[misc]

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """Returns the context in which vLLM allocates KV tensors or, in sleep mode, weights.

        Overrides `Worker._maybe_get_memory_pool_context`.
        """
        if tag == "kv_cache" and self._tensor_mode is not None:
            return self._tensor_mode
        if not self.vllm_config.model_config.enable_sleep_mode:
            return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        if tag != "weights":
            return nullcontext()
        from pyvmem.vllm.sleep import loading_weights

        return loading_weights(self._settings, self.device.index or 0)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Creates the KV tensors on elastic memory and maps the null block.

        Overrides `Worker.initialize_from_config`.

        Raises:
            NotImplementedError: an attention back end does not keep a block contiguous.
        """
        from pyvmem.vllm.allocation import backends_refusing_plain, place_tensors

        offload.clear()
        offload.count_by(self.vllm_config, kv_cache_config)
        wary = (
            []
            if self._settings.visible
            else backends_refusing_plain(self.vllm_config, kv_cache_config)
        )
        if wary and self.device.type == "cuda":
            log.info("vmem: KV tensors have addresses that CUDA knows, for %s", ", ".join(wary))
            self._settings = dataclasses.replace(self._settings, visible=True)
        kv_cache_config, self._tensor_mode = place_tensors(kv_cache_config, self._open)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._tensor_mode.check()
        self._tensor_mode = None
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
        """Creates the memory for tensors of the given sizes in bytes and maps the null block."""
        settings, gpu = self._settings, self.device.type == "cuda"
        device = self.device.index or 0 if gpu else None
        most = min(sum(sizes), settings.limit or sum(sizes), device_total(device))
        page, why = choose_page(num_blocks, sizes, most, settings.page_size, settings.limit)
        if self.rank == 0:
            log.info("vmem: %d KV tensors on pages of %s: %s", len(sizes), format_bytes(page), why)
        context = open_context(
            settings.backend or ("auto" if gpu else "host"),
            device or 0,
            page if page != SMALL or settings.page_size else 0,  # 0: the back end's smallest page
            settings.reserve if settings.reserve is not None else 256 << 20,
        )
        memory = self._memory = KVMemory(context, num_blocks, sizes, visible=settings.visible)
        # Covers a worker that is garbage-collected without being shut down, as after ``del llm``.
        weakref.finalize(self, memory.close).atexit = False
        memory.grow(
            runs_of([memory.geometry.pages(k, 0) for k in range(len(memory.geometry.classes))])
        )
        return memory

    def compile_or_warm_up_model(self) -> Any:
        """Backs the blocks that the warm-up uses, warms up, and starts serving the scheduler.

        Overrides `Worker.compile_or_warm_up_model`.
        """
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

    def vmem_address(self) -> RankAddress | None:
        """Returns this rank's address, or None if it has no KV tensors.

        The scheduler calls this through `Executor.collective_rpc`.
        """
        if self._server is None:
            return None
        return RankAddress(machine(self._settings), self._server.address)

    def vmem_listen(self, scheduler: str) -> tuple[str, int, str] | None:
        """Calls `Server.listen` and returns its result if the scheduler is on another machine.

        The scheduler calls this through `Executor.collective_rpc`.

        Args:
            scheduler: the value that `machine` returns in the scheduler's process.
        """
        if self._server is None or machine(self._settings) == scheduler:
            return None
        from vllm.utils.network_utils import get_ip

        return self._server.listen(get_ip())

    def _headroom(self) -> int:
        """Returns how many more bytes torch may need: up to its peak so far, plus a margin."""
        if self.device.type != "cuda":
            return 0
        import torch

        peak = torch.cuda.max_memory_allocated(self.device)
        return max(0, peak - torch.cuda.memory_reserved(self.device)) + _MARGIN

    # ---- steps -----------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """Launches a step, after applying its releases, moves and dropped stores.

        Overrides `Worker.execute_model`.

        Raises:
            RuntimeError: the step was not scheduled by our scheduler.
        """
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
                "the step was not scheduled by pyvmem's scheduler: its blocks have no memory"
            )
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if output is not None or not scheduler_output.total_num_scheduled_tokens:
            memory.step_ends(self._step)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Launches the last part of a step. Overrides `Worker.sample_tokens`."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._memory is not None:
            self._memory.step_ends(self._step)
        return output

    def execute_dummy_batch(self) -> None:
        """Runs a dummy batch on the null block, as ranks without requests must.

        The block tables are cleared first, since the V2 runner of 0.26 leaves blocks of finished
        requests in them. Overrides `Worker.execute_dummy_batch`.
        """
        tables = getattr(self.model_runner, "block_tables", None)
        for table in tables.input_block_tables if tables is not None else ():
            table.zero_()
        super().execute_dummy_batch()  # type: ignore[misc]

    def sleep(self, level: int = 1) -> None:
        """Puts the weights to sleep and waits until the KV cache's memory is freed.

        The memory is already free unless the caller bypassed the scheduler, as verl does. Overrides
        `Worker.sleep`.
        """
        super().sleep(level)  # type: ignore[misc]
        self._rest()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drops the memory with these tags and waits until the KV cache's memory is freed.

        Overrides `Worker.discard`.
        """
        if tags != ("kv_cache",) or self.vllm_config.model_config.enable_sleep_mode:
            super().discard(tags)  # type: ignore[misc]
        self._rest()

    def _rest(self) -> None:
        if self._memory is not None and not self._memory.drain(_PATIENCE):
            log.warning("vmem: a sleeping worker still has the memory of its KV cache")

    def shutdown(self) -> None:
        """Shuts down the worker and frees the KV memory. Overrides `Worker.shutdown`."""
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
    """Backs the blocks that the V2 runner uses outside a step, until the ``with`` block ends.

    Since 0.31, `prepare_dummy_attn` uses them to warm up the kernels of stateful layers.
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
    """Yields the tensors of all layers.

    Before vLLM 0.28, a stateful layer has a list of tensors instead of a single tensor.
    """
    for one in kv_caches:
        yield from one if isinstance(one, list | tuple) else (one,)


def _blocks_named(scheduler_output: Any) -> list[int]:
    """Returns the blocks of a step's new requests and those newly added to other requests."""
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
