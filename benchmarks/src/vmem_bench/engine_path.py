# SPDX-License-Identifier: MIT
"""The PYTHONPATH for engines that `vmem bench vllm` and `vmem bench sglang` start."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pyvmem
import vmem_bench

__all__ = ["engine_path"]

_ROOTS = [str(Path(one.__path__[0]).parent) for one in (pyvmem, vmem_bench)]
_WEIGHTS = {
    "vllm.general_plugins": ["vmem_bench = vmem_bench.weights:register_vllm"],
    "sglang.srt.plugins": ["vmem_bench = vmem_bench.weights:register_sglang"],
}
_PYVMEM = {
    "vllm.general_plugins": ["vmem = pyvmem_vllm:register"],
    "sglang.srt.plugins": ["vmem = pyvmem_sglang:register"],
    "torch.backends": [
        "vmem = pyvmem_vllm:check_plugins",
        "vmem_sglang = pyvmem_sglang:check_plugins",
    ],
}


def engine_path(folder: Path, path: str = "") -> str:
    """Returns a PYTHONPATH with pyvmem, the benchmarks and the entry points that an engine needs.

    The entry points load the plug-in that randomizes the weights and, if pyvmem is not installed,
    pyvmem's plug-ins.

    Args:
        folder: directory for the entry points; must not exist.
        path: the engine's PYTHONPATH; "" to use this process's.
    """
    given = os.environ.get("PYTHONPATH", "")
    mine = given.split(os.pathsep) if path else []
    where = [*path.split(os.pathsep), *(one for one in sys.path if one not in mine)]
    there = (one for found in metadata.distributions(path=where) for one in found.entry_points)
    installed = any((one.group, one.name) == ("vllm.general_plugins", "vmem") for one in there)
    groups = [_WEIGHTS] if installed else [_WEIGHTS, _PYVMEM]
    info = folder / "vmem_bench_engines-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vmem-bench-engines\nVersion: 0\n")
    names = dict.fromkeys(name for group in groups for name in group)
    text = "".join(
        f"[{name}]\n" + "".join(f"{line}\n" for group in groups for line in group.get(name, []))
        for name in names
    )
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    return os.pathsep.join([str(folder), *filter(None, [path or given]), *_ROOTS])
