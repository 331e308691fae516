# SPDX-License-Identifier: MIT
"""The entry points that SGLang and torch load; imports only the standard library.

If an entry point cannot be imported or its function raises an `Exception`, SGLang logs the error
and continues without it. So imports that may fail are done in the function, which turns their
errors into `SystemExit`.
"""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["check_plugins", "register"]


def _asked() -> bool:
    return os.environ.get("VMEM_SGLANG", "") not in ("", "0")


def register() -> None:
    """Enables the pool if ``VMEM_SGLANG=1``; the entry point ``sglang.srt.plugins``.

    SGLang calls this in each of its processes.

    Raises:
        SystemExit: pyvmem cannot be imported, or `pyvmem.sglang.plugin.register` failed.
    """
    if not _asked():
        return
    try:
        from pyvmem.sglang.plugin import register

        register()
    except Exception as error:
        raise SystemExit(f"VMEM_SGLANG=1: {type(error).__name__}: {error}") from error


def check_plugins() -> None:
    """Checks that ``SGLANG_PLUGINS`` does not exclude `register`; entry point ``torch.backends``.

    torch, which SGLang imports first, calls this at the end of ``import torch``. If `register` is
    excluded, SGLang calls no other function of ours. Only warns if SGLang is not being imported.

    Raises:
        RuntimeError: `register` is excluded, and SGLang is being imported.
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
