# SPDX-License-Identifier: MIT
"""The entry points that vLLM and torch load. Needs the standard library alone.

vLLM logs an entry point that cannot be imported and goes on as if there were none; what its
function raises, it does not catch. So the function imports what may fail.
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
    """``vllm.general_plugins``: called in every process of vLLM.

    Raises:
        ImportError: pyvmem cannot be imported.
        Exception: as `pyvmem.vllm.plugin.register`.
    """
    if _asked():
        _register()
    else:
        _register_late()


def _register() -> None:
    from pyvmem.vllm.plugin import register

    register()


def _register_late() -> None:
    """Registers when an engine is configured, if the variable is set by then.

    vLLM calls its entry points once in a process, before the first configuration.
    """
    arguments: Any = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None:  # a process that configures nothing
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
    """``torch.backends``: called at the end of ``import torch``, which vLLM begins with.

    Where ``VLLM_PLUGINS`` leaves `register` out, vLLM runs nothing else that could say so.

    Raises:
        RuntimeError: it does, and vLLM is being imported; elsewhere it is a warning.
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
