# SPDX-License-Identifier: MIT
"""KV offloading: checks the connector and substitutes our offloading spec for vLLM's.

vLLM's OffloadingConnector loads an offloading spec by name and module. We configure
`VMemOffloadingSpec`, since vLLM's spec for host memory copies with cudaMemcpy, which rejects the
pool's addresses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyvmem.elastic.memory import KVMemory, device_total
from pyvmem.elastic.settings import Settings
from pyvmem.plumbing.units import format_bytes

__all__ = [
    "BLOCK_BYTES",
    "begin",
    "clear",
    "count_by",
    "drop",
    "host_bytes",
    "reasons_against",
    "select",
]

_SPEC = ("VMemOffloadingSpec", "pyvmem.vllm.offload_spec")
_TIERS = ("VMemTieringSpec", "pyvmem.vllm.offload_tiers")
_SPECS = {
    None: _SPEC,
    "CPUOffloadingSpec": _SPEC,
    _SPEC[0]: _SPEC,
    "TieringOffloadingSpec": _TIERS,
    _TIERS[0]: _TIERS,
}
_NETWORK = (
    "it registers the KV cache with the network card, which refuses pages of the pool (no "
    "GPU-direct); OffloadingConnector works"
)
_WHY = {
    "SimpleCPUOffloadConnector": "its copies, by cudaMemcpyBatchAsync, run between steps, and "
    "the pool would not wait for them; without VLLM_USE_SIMPLE_KV_OFFLOAD vLLM uses "
    "OffloadingConnector, which works",
    # benchmarks/results/logs/h200-lmcache.log
    "LMCacheConnectorV1": "LMCache 0.5.6 loads only the first half of each block of vLLM 0.33's KV "
    "cache, in stock vLLM too; OffloadingConnector works",
    "LMCacheMPConnector": "another process opens the KV cache by a CUDA IPC handle, and the pool's "
    "addresses have none; OffloadingConnector works",
    "MultiConnector": "the connectors in it are not checked; OffloadingConnector works",
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", "NixlPushConnector"), _NETWORK),
    **dict.fromkeys(("MooncakeConnector", "MoRIIOConnector"), _NETWORK),
}
_OTHERWISE = (
    "how it copies is unknown; a connector that copies only by cudaMemcpy and within a step works "
    "with VMEM_VISIBLE=1 or VMEM_BACKEND=cuda, and vmem_copies_in_step=true in its extra "
    "configuration; so does OffloadingConnector"
)
BLOCK_BYTES = "vmem_block_bytes"  # key in a spec's extra configuration: bytes per block and rank
_IN_STEP = "vmem_copies_in_step"  # set by the user to assert that a connector copies within steps


def reasons_against(config: Any) -> Iterator[str]:
    """Yields each KV-transfer option of a `VllmConfig` that rules out the pool, with the reason."""
    transfer = config.kv_transfer_config
    name = getattr(transfer, "kv_connector", None)
    if name is None:
        return
    if name != "OffloadingConnector" or transfer.kv_connector_module_path:
        yield from _others(name, transfer)
        return
    extra = transfer.kv_connector_extra_config
    if transfer.kv_role != "kv_both":
        yield f"kv_role={transfer.kv_role} (offloading stores and loads: kv_both)"
    spec = extra.get("spec_name")
    if not isinstance(spec, str | None) or spec not in _SPECS:
        yield (
            f"spec_name={spec} (its copies are not the pool's; those of CPUOffloadingSpec and "
            "TieringOffloadingSpec are replaced)"
        )
    elif _SPECS[spec] == _TIERS:
        yield from _tiers(extra.get("secondary_tiers", []))
    if extra.get("canonical_layout"):
        yield "canonical_layout (host memory has the layout of the KV cache)"
    yield from _sizes(extra.get("cpu_bytes_to_use"))


def _others(name: str, transfer: Any) -> Iterator[str]:
    """Yields reasons to reject a connector other than vLLM's OffloadingConnector."""
    own = transfer.kv_connector_module_path
    vouched = transfer.kv_connector_extra_config.get(_IN_STEP, False)
    if not isinstance(vouched, bool):
        yield f"{_IN_STEP}={vouched!r} (expected true or false)"
    elif name in _WHY and not own:
        yield f"kv_connector={name} ({_WHY[name]})"
    elif not vouched:
        yield f"kv_connector={name} ({_OTHERWISE})"
    elif not Settings.asks_visible():
        yield (
            f"kv_connector={name} (it copies by cudaMemcpy, which rejects plain addresses; "
            "set VMEM_VISIBLE=1 or VMEM_BACKEND=cuda)"
        )


def _tiers(tiers: Any) -> Iterator[str]:
    """Yields lower-tier configuration errors that vLLM would report late or not at all."""
    if not isinstance(tiers, list) or not all(isinstance(one, dict) for one in tiers):
        yield f"secondary_tiers={tiers!r} (expected a list of configurations)"
        return
    for one in tiers:
        root = one.get("root_dir")
        if one.get("type") != "fs":
            continue
        if not isinstance(root, str) or not root:
            yield f"root_dir={root!r} of a tier fs (expected a folder)"
        elif why := _cannot_write(Path(root)):
            yield f"root_dir={root} of a tier fs ({why})"


def _cannot_write(folder: Path) -> str:
    """Returns why files cannot be created in a folder, which may not exist yet; "" if they can."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return f"{there} cannot be written"
    return ""


def _sizes(asked: Any) -> Iterator[str]:
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not math.isfinite(asked):
        yield f"cpu_bytes_to_use={asked!r} (expected bytes of host memory; or kv_offloading_size)"
    elif asked < 1:
        yield f"kv_offloading_size of {asked:g} bytes (expected more than 0)"
    elif asked > (most := device_total(None)):
        yield (
            f"kv_offloading_size of {int(asked)} bytes, {format_bytes(int(asked))} (the machine "
            f"has {most} bytes of host memory)"
        )


def host_bytes(config: Any) -> int:
    """Returns how many bytes of host memory all ranks use for offloading; 0 if it is disabled."""
    transfer = config.kv_transfer_config
    if getattr(transfer, "kv_connector", None) != "OffloadingConnector":
        return 0
    return int(transfer.kv_connector_extra_config["cpu_bytes_to_use"])


def select(config: Any) -> None:
    """Makes a configuration's OffloadingConnector load our spec; ignores other connectors."""
    transfer = config.kv_transfer_config
    if getattr(transfer, "kv_connector", None) != "OffloadingConnector":
        return
    extra = transfer.kv_connector_extra_config
    name, module = _SPECS[extra.get("spec_name")]
    extra.update(spec_name=name, spec_module_path=module)
    # An idle engine drops its prefixes from the GPU, so offload generated tokens as well.
    extra.setdefault("offload_prompt_only", False)


def _transferrer() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    worker = getattr(get_kv_transfer_group(), "connector_worker", None)
    return getattr(worker, "worker", None)


def clear() -> None:
    """Shuts down the connector left in this process by an engine that failed to start.

    Otherwise, vLLM would reuse it for the next engine, whose KV tensors have other addresses.
    """
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


def count_by(config: Any, kv_cache_config: Any) -> None:
    """Gives this rank's spec the block size that the scheduler's spec computes.

    vLLM divides the size of the KV cache by its number of blocks. The pool's KV cache is larger
    because each layer starts on a new page, so the worker would count fewer chunks than the
    scheduler.
    """
    tensors = kv_cache_config.kv_cache_tensors
    if host_bytes(config) and tensors and hasattr(tensors[0], "layer_stride"):
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra[BLOCK_BYTES] = tensors[0].size // kv_cache_config.num_blocks


def begin(memory: KVMemory, device: Any) -> None:
    """Enables this rank's transfers if it has a connector; unmapping then waits for transfers."""
    transferrer = _transferrer()
    if transferrer is not None:
        from pyvmem.memory.host_copies import copies_for

        make = copies_for(memory.context, device)
        memory.copies = transferrer.begin(make(True), make(False))


def drop(stores: list[int]) -> None:
    """Makes this rank skip these stores; called in the worker before a step."""
    if stores:
        _transferrer().dropped.update(stores)
