# SPDX-License-Identifier: MIT
"""VMEM_VLLM=1 enables the pool or raises; stock vLLM never runs silently."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Yields a function that loads vLLM's plug-ins as if this process had not done so yet."""
    from vllm import plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor

    made, started = EngineArgs.create_engine_config, Executor.__init__
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    yield plugins.load_general_plugins
    EngineArgs.create_engine_config, Executor.__init__ = made, started


def scheduler_of(model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model, skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    return arguments.create_engine_config().scheduler_config.scheduler_cls


def test_the_variable_is_set_after_plug_ins_were_loaded(
    loading: Callable[[], None], models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama")
    monkeypatch.delenv("VMEM_VLLM", raising=False)
    loading()
    assert scheduler_of(model) is None
    monkeypatch.setenv("VMEM_VLLM", "1")
    assert "pyvmem.vllm.scheduler.Elastic" in scheduler_of(model)
    monkeypatch.setenv("VMEM_VLLM", "0")
    assert scheduler_of(model) is None
    monkeypatch.setenv("VMEM_VLLM", "yes")
    with pytest.raises(ValueError, match="VMEM_VLLM='yes': expected 1 or 0"):
        scheduler_of(model)


def test_a_failed_import_is_an_error(
    loading: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyvmem.vllm.plugin", None)
    monkeypatch.setenv("VMEM_VLLM", "1")
    with pytest.raises(ImportError, match=r"pyvmem\.vllm\.plugin"):
        loading()


def test_vllm_is_told_to_leave_the_plug_in_out() -> None:
    env = os.environ | {"VMEM_VLLM": "1", "VLLM_PLUGINS": "a,b"}
    program = [sys.executable, "-c", "import vllm"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "VMEM_VLLM=1 has no effect, since VLLM_PLUGINS='a,b' does not name" in done.stderr
