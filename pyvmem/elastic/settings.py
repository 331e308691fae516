# SPDX-License-Identifier: MIT
"""Parses the environment variables of an engine's elastic pool.

    VMEM_VLLM=1          makes vLLM use the pool; VMEM_SGLANG=1 makes SGLang use it
    VMEM_BACKEND         host, cuda, stock, uvm or auto; default: auto on a GPU, host on a CPU
    VMEM_PAGE_SIZE       bytes per page; default: 2M on the cuda back end or if a lot of memory
                         can be mapped; otherwise 64K
    VMEM_LIMIT           maximum bytes per GPU for the KV cache; default: the GPU's memory
    VMEM_FLOOR           bytes per GPU that other engines must leave free for this one; default 0
    VMEM_RESERVE         bytes kept mapped ahead of need; default 256M, at most 1/8 of the limit,
                         and more after steps that needed more; 0: none
    VMEM_IDLE            seconds after which unused memory is released; default 1
    VMEM_PREFIX          maximum bytes of idle prefixes; default: no limit
    VMEM_NAME            the engine's name, for `vmem top` and `vmem limit`; default: the model's
    VMEM_LEDGER          folder of the ledger that engines share; "off": no ledger
    VMEM_CAPACITY        total bytes for all engines on a device; default: the ledger's
    VMEM_HOST_LIMIT      maximum bytes of host memory for KV offloading, for all engines with this
                         VMEM_LEDGER together; default: no limit
    VMEM_VISIBLE=1       makes the KV cache's addresses usable by CUDA's own copies, which some vLLM
                         connectors need; all such memory must fit in the GPU's free memory

Sizes take K, M, G, T (powers of 1024): 20G, 1.5G, 512M.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyvmem._native import backend_names
from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import default_folder, is_off
from pyvmem.plumbing.paths import folder_in
from pyvmem.plumbing.units import parse_bytes

__all__ = ["Settings"]

_PAGES = (4 << 10, 1 << 30)  # smallest and largest page size of any back end


def _seconds(text: str, name: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise ValueError(f"{name}={text!r}: expected seconds, 0 or more")
    return value


@dataclass(frozen=True)
class Settings:
    """The values of the variables listed above, read once in each process. Sizes are in bytes.

    Attributes:
        backend: name of the back end; ``""`` to choose one for the engine's device.
        page_size: page size; 0 to let `pyvmem.elastic.choice` decide.
        limit: maximum memory per GPU; None for the device's memory.
        floor: memory per GPU that other engines must leave free for this one.
        reserve: memory kept mapped ahead of need; None for the default.
        idle: seconds after which unused memory is released.
        prefix: maximum memory of idle prefixes; None for no limit.
        name: the engine's name; ``""`` for the model's name.
        capacity: total memory for all engines on a device; 0 for the ledger's value.
        host_limit: maximum host memory for KV offloading; 0 for no limit.
        ledger: folder of the ledgers; ``""`` for the default, None to use no ledger.
        visible: whether CUDA's own copies must be able to use the KV cache's addresses.
    """

    backend: str = ""
    page_size: int = 0
    limit: int | None = None
    floor: int = 0
    reserve: int | None = None
    idle: float = 1.0
    prefix: int | None = None
    name: str = ""
    ledger: str | None = ""
    capacity: int = 0
    host_limit: int = 0
    visible: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the ledgers.

        Sockets are created in this folder even if the engine uses no ledger.
        """
        return Path(self.ledger) if self.ledger else default_folder()

    @staticmethod
    def asked(name: str, env: Mapping[str, str] = os.environ) -> bool:
        """Returns true if a switch, such as ``VMEM_VLLM``, is set to 1.

        Args:
            name: name of the variable.
            env: the environment.

        Raises:
            ValueError: the value is not 1, 0 or empty.
        """
        switch = env.get(name, "")
        if switch not in ("", "0", "1"):
            raise ValueError(f"{name}={switch!r}: expected 1 or 0")
        return switch == "1"

    @classmethod
    def asks_visible(cls, env: Mapping[str, str] = os.environ) -> bool:
        """Returns true if CUDA's own copies will accept the KV cache's addresses.

        They do if VMEM_VISIBLE is 1 or the back end is ``cuda``.

        Raises:
            ValueError: VMEM_VISIBLE is neither 1 nor 0.
        """
        return cls.asked("VMEM_VISIBLE", env) or env.get("VMEM_BACKEND", "") == "cuda"

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Reads and checks all variables.

        Raises:
            ValueError: a variable is malformed, or variables contradict each other.
        """

        def size(name: str) -> int | None:
            text = env.get(name, "")
            return parse_bytes(text, name) if text else None

        page_size = size("VMEM_PAGE_SIZE") or 0
        least, most = _PAGES
        if page_size and (page_size & (page_size - 1) or not least <= page_size <= most):
            raise ValueError(
                f"VMEM_PAGE_SIZE={page_size}: expected a power of two from {least} to {most}"
            )
        backend = env.get("VMEM_BACKEND", "")
        if backend not in ("", "auto", *backend_names()):
            names = ", ".join(("auto", *backend_names()))
            raise ValueError(f"VMEM_BACKEND={backend!r}: expected one of {names}")
        limit, floor = size("VMEM_LIMIT"), size("VMEM_FLOOR") or 0
        if limit is not None and limit < floor:
            raise ValueError(f"VMEM_LIMIT={limit} is below VMEM_FLOOR={floor}")
        if limit is not None and limit < page_size:
            raise ValueError(f"VMEM_LIMIT={limit} is less than a page, VMEM_PAGE_SIZE={page_size}")
        name = env.get("VMEM_NAME", "")
        if name and not re.fullmatch(r"[\w.@:/+-]{1,63}", name, re.ASCII):
            raise ValueError(
                f"VMEM_NAME={name!r}: expected 1 to 63 letters, digits or any of . _ - / : @ +"
            )
        try:
            ledger = None if is_off(env) else str(folder_in("VMEM_LEDGER", env) or "")
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        host_limit = size("VMEM_HOST_LIMIT") or 0
        if host_limit and ledger is None:
            raise ValueError(
                f"VMEM_HOST_LIMIT={host_limit}: VMEM_LEDGER=off, but the limit needs a ledger "
                "to count the memory of other engines"
            )
        return cls(
            backend="" if backend == "auto" else backend,
            page_size=page_size,
            limit=limit,
            floor=floor,
            reserve=size("VMEM_RESERVE"),
            idle=_seconds(env.get("VMEM_IDLE", "") or "1", "VMEM_IDLE"),
            prefix=size("VMEM_PREFIX"),
            name=name,
            capacity=size("VMEM_CAPACITY") or 0,
            host_limit=host_limit,
            ledger=ledger,
            visible=cls.asks_visible(env),
        )

    def check_device(self, total: int) -> None:
        """Checks the limit and the floor against `total`, the device's memory per rank in bytes.

        Raises:
            ValueError: the limit or the floor exceeds `total`.
        """
        for name, value in (("VMEM_LIMIT", self.limit), ("VMEM_FLOOR", self.floor)):
            if value is not None and value > total:
                raise ValueError(f"{name}={value} exceeds the device's {total} bytes per rank")
