# SPDX-License-Identifier: MIT
"""FlashAttention: version 3 from an installed package, version 2 from torch. CUDA only."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyvmem.attention.reads import BLOCK, Blocks
from pyvmem.attention.scales import FP8, Scales, quantised

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch
    from pyvmem.attention.layers import Form

__all__ = [
    "fa2",
    "fa3",
    "fa3_call",
    "fa3_paged",
    "why_not_blocks",
    "why_not_fa2",
    "why_not_fa3",
    "why_not_fa3_paged",
]

_VLLM = "_vllm_fa3_C"
_HALF = ("float16", "bfloat16")
_DESCALES = ("q_descale", "k_descale", "v_descale")


def _why_not_here(
    form: Form, device: torch.device, major: int, exactly: bool, dtypes: tuple[str, ...]
) -> str:
    """Returns why FlashAttention does not support this GPU or layer shape; "" if it does."""
    if device.type != "cuda":
        return "it needs a GPU"
    have = torch.cuda.get_device_capability(device)
    if have[0] < major or (exactly and have[0] != major):
        return f"it needs compute capability {major}.x, this GPU has {have[0]}.{have[1]}"
    if form.dtype not in dtypes:
        return f"it has no {form.dtype}"
    wide = 16 if form.dtype == FP8 else 8
    if form.head_dim > 256 or form.head_dim % wide:
        return f"head_dim {form.head_dim} is not a multiple of {wide} up to 256"
    if form.v_head_dim != form.head_dim:
        return f"keys of {form.head_dim} elements and values of {form.v_head_dim}"
    return ""


# ---- version 3 -----------------------------------------------------------------------------------


@functools.cache
def _fa3() -> tuple[Any, str]:
    """Returns FlashAttention-3's entry point and "", or None and the reason it is missing."""
    library = os.environ.get("VMEM_FA3", "")
    if not hasattr(torch.ops, _VLLM) or not hasattr(getattr(torch.ops, _VLLM), "fwd"):
        path = Path(library) if library else _in_vllm()
        if path is not None:
            try:
                load: Any = torch.ops.load_library
                load(str(path))
            except OSError as error:
                return None, f"{path} cannot be loaded: {str(error).splitlines()[0]}"
    operators = getattr(torch.ops, _VLLM)
    if hasattr(operators, "fwd"):
        return _vllm_call(operators.fwd)
    if importlib.util.find_spec("flash_attn_interface") is not None:
        interface: Any = importlib.import_module("flash_attn_interface")
        return functools.partial(_interface_call, interface.flash_attn_with_kvcache), ""
    return None, "vLLM's package, $VMEM_FA3 and flash_attn_interface do not provide it"


def fa3_call() -> Any:
    """Returns FlashAttention-3's entry point, which accepts any device address.

    ``call(q, k, v, batch, scale, table=None, window=0, descales=None)``; `descales` holds the
    descale factors of q, k and v, each float32 ``[requests, num_kv_heads]``. The call reads
    `starts`, `used`, `max_q` and, if there is no block table, `index` from `batch`.

    Raises:
        RuntimeError: no installed package provides it; the message says why.
    """
    call, why = _fa3()
    if call is None:
        raise RuntimeError(why)
    return call


def _in_vllm() -> Path | None:
    """Finds the shared object of an installed vLLM without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "vllm_flash_attn" / f"{_VLLM}.abi3.so"
    return path if path.is_file() else None


def _vllm_call(op: Any) -> tuple[Any, str]:
    """Wraps vLLM's op to pass arguments by name, since releases add arguments to its schema."""
    arguments = op.default._schema.arguments
    names = {argument.name for argument in arguments}
    needed = {"q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"}
    needed |= {"kv_batch_idx", "page_table", "softmax_scale", "is_causal"}
    if needed - names:
        return None, f"vLLM's op has no argument {', '.join(sorted(needed - names))}"
    fixed = {"window_size_right": -1, "softcap": 0.0, "num_splits": 0}
    fixed |= {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        scale: float,
        table: torch.Tensor | None = None,
        window: int = 0,
        descales: tuple[torch.Tensor, ...] | None = None,
    ) -> Any:
        values: dict[str, Any] = {
            **fixed,
            "window_size_left": window - 1,
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": batch.starts,
            "seqused_k": batch.used,
            "max_seqlen_q": batch.max_q,
            "softmax_scale": scale,
            "is_causal": True,
        }
        if table is None:
            values["kv_batch_idx"] = batch.index
            values["max_seqlen_k"] = k.shape[1]  # the op reads the slot length from this
        else:
            values["page_table"] = table
            values["max_seqlen_k"] = table.shape[1] * k.shape[1]
        if window:
            values["window_size_right"] = 0
        if descales is not None:
            values.update(zip(_DESCALES, descales, strict=True))
        return op(*[values.get(argument.name) for argument in arguments])[0]

    return call, ""


def _interface_call(
    function: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    scale: float,
    table: torch.Tensor | None = None,
    window: int = 0,
    descales: tuple[torch.Tensor, ...] | None = None,
) -> Any:
    where = {"cache_batch_idx": batch.index} if table is None else {"page_table": table}
    return function(
        q,
        k,
        v,
        cache_seqlens=batch.used,
        **where,
        cu_seqlens_q=batch.starts,
        max_seqlen_q=batch.max_q,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        **({} if descales is None else dict(zip(_DESCALES, descales, strict=True))),
    )


def why_not_fa3(form: Form, device: torch.device) -> str:
    """Returns why FlashAttention-3 cannot be used; "" if it can."""
    return _why_not_here(form, device, 9, True, (*_HALF, FP8)) or str(_fa3()[1])


def fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int = 0,
    scales: Scales | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls the kernel once. It reads whole tiles of up to 192 rows; with `table`, only valid rows.

    `scales` are used for 8-bit keys and values. If `table` is given, `k` and `v` must view the
    slots as blocks.
    """
    descales = None
    if scales is not None:
        queries, shape = scales.of_queries(q), (len(batch.reqids), k.shape[2])
        each = (queries, scales.key, scales.value)
        descales = tuple(one.to(q.device).expand(shape) for one in each)
        q = quantised(q, queries)
    out: torch.Tensor = fa3_call()(q, k, v, batch, scale, table, window, descales)
    return out


def why_not_fa3_paged(form: Form, device: torch.device) -> str:
    """Returns why FlashAttention-3's paged call cannot be used; "" if it can."""
    return why_not_fa3(form, device) or why_not_blocks(form)


def why_not_blocks(form: Form) -> str:
    """Returns why a slot cannot be addressed as blocks of `BLOCK` rows; "" if it can."""
    layout = form.keys.layout
    if layout.max_rows < BLOCK:
        return f"slots of {layout.max_rows} rows are not a multiple of blocks of {BLOCK}"
    blocks = Blocks.of(layout.max_rows, layout.slot_bytes, layout.row_bytes)
    last = blocks.last(form.keys.config.max_batch)
    return f"blocks of {BLOCK} rows, numbered up to {last}" if last >= 1 << 31 else ""


def fa3_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int = 0,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Calls the paged kernel on the slots, viewed as blocks; never reads past a request's length.

    The table is only as wide as the batch needs, since the op bases its splits on the width. In a
    CUDA graph, the table covers a whole slot, to allow for any length.
    """
    blocks = Blocks.of(k.shape[1], k.stride(0), k.stride(1))
    table = batch.block_table(blocks)
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        table = table[:, : blocks.wanted(batch.max_kv)]
    return fa3(q, blocks.view(k), blocks.view(v), batch, scale, window, scales, table)


# ---- version 2 -----------------------------------------------------------------------------------


def why_not_fa2(form: Form, device: torch.device) -> str:
    """Returns why torch's FlashAttention-2 cannot be used; "" if it can."""
    why = _why_not_here(form, device, 8, False, _HALF)
    if why:
        return why
    op: Any = torch.ops.aten._flash_attention_forward
    if "seqused_k" not in {argument.name for argument in op.default._schema.arguments}:
        return f"torch {torch.__version__} has no seqused_k"
    layout = form.keys.layout
    if layout.slot_bytes % layout.row_bytes:
        return (
            f"slots are {layout.slot_bytes} bytes apart, which is not a whole number of rows of "
            f"{layout.row_bytes} (see KVCacheConfig.packed_slots)"
        )
    return ""


def fa2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int = 0
) -> torch.Tensor:
    """Calls the kernel once; it never reads past a request's length (``seqused_k``).

    The op takes no slot index, so it is passed all slots as one long sequence: request i starts at
    ``cum_seq_k[i]``.
    """
    pitch = k.stride(0) // k.stride(1)
    rows = (k.shape[0] - 1) * pitch + k.shape[1]
    shape, stride = (rows, k.shape[2], k.shape[3]), (k.stride(1), k.stride(2), k.stride(3))
    first = torch.nn.functional.pad(batch.index * pitch, (0, 1), value=rows)
    op: Any = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = op(
        q,
        k.as_strided(shape, stride),
        v.as_strided(shape, stride),
        batch.starts,
        first,
        batch.max_q,
        batch.max_kv,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
        seqused_k=batch.used,
    )[0]
    return out
