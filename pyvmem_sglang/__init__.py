# SPDX-License-Identifier: MIT
"""The entry points that SGLang and torch load. Needs the standard library alone.

SGLang logs an entry point that cannot be imported, and an `Exception` of its function, and goes on
as if there were none. So the function imports what may fail, and ends the process.
"""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["check_plugins", "register"]


def _asked() -> bool:
    return os.environ.get("VMEM_SGLANG", "") not in ("", "0")


def register() -> None:
    """``sglang.srt.plugins``: called in every process of SGLang.

    Raises:
        SystemExit: pyvmem cannot be imported, or as `pyvmem.sglang.plugin.register`.
    """
    if not _asked():
        return
    try:
        from pyvmem.sglang.plugin import register

        register()
    except Exception as error:
        raise SystemExit(f"VMEM_SGLANG=1: {type(error).__name__}: {error}") from error


def check_plugins() -> None:
    """``torch.backends``: called at the end of ``import torch``, which SGLang begins with.

    Where ``SGLANG_PLUGINS`` leaves `register` out, SGLang runs nothing else that could say so.

    Raises:
        RuntimeError: it does, and SGLang is being imported; elsewhere it is a warning.
    """
    names = os.environ.get("SGLANG_PLUGINS")
    if not _asked() or not names or "vmem" in (name.strip() for name in names.split(",")):
        return
    text = (
        f"VMEM_SGLANG={os.environ['VMEM_SGLANG']} has no effect, since SGLANG_PLUGINS={names!r} "
        "does not name the plug-in vmem: add it, or unset one of the variables"
    )
    if "sglang" in sys.modules:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)
