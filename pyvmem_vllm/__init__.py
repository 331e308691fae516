# SPDX-License-Identifier: MIT
"""The entry points that vLLM and torch load; imports only the standard library.

If an entry point cannot be imported, vLLM logs the error and continues without it. It does not
catch exceptions from the entry point's function, so imports that may fail are done there.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

__all__ = ["check_plugins", "register"]


def _asked() -> bool:
    return os.environ.get("VMEM_VLLM", "") not in ("", "0")


def register() -> None:
    """Enables the pool if ``VMEM_VLLM=1``; the entry point ``vllm.general_plugins``.

    vLLM calls this in each of its processes.

    Raises:
        ImportError: pyvmem cannot be imported.
        Exception: `pyvmem.vllm.plugin.register` failed.
    """
    if _asked():
        _register()
    else:
        _register_late()


def _register() -> None:
    from pyvmem.vllm.plugin import register

    register()


def _register_late() -> None:
    """Wraps `create_engine_config` to enable the pool if the variable is set by the time it runs.

    vLLM calls its entry points only once per process, before it creates a configuration.
    """
    arguments: Any = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None:  # a process that does not create configurations
        return
    owner = arguments.EngineArgs
    create = owner.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _asked():
            return create(self, *args, **kwargs)
        owner.create_engine_config = create
        _register()
        return owner.create_engine_config(self, *args, **kwargs)

    owner.create_engine_config = create_engine_config


def check_plugins() -> None:
    """Checks that ``VLLM_PLUGINS`` does not exclude `register`; the entry point ``torch.backends``.

    torch, which vLLM imports first, calls this at the end of ``import torch``. If `register` is
    excluded, vLLM calls no other function of ours. Only warns if vLLM is not being imported.

    Raises:
        RuntimeError: `register` is excluded, and vLLM is being imported.
    """
    names = os.environ.get("VLLM_PLUGINS")
    if not _asked() or names is None or "vmem" in names.split(","):
        return
    text = (
        f"VMEM_VLLM={os.environ['VMEM_VLLM']} has no effect, since VLLM_PLUGINS={names!r} does not "
        "name the plug-in vmem: add it, or unset one of the variables"
    )
    if "vllm" in sys.modules:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)
