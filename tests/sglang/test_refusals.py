# SPDX-License-Identifier: MIT
"""An unsupported configuration stops the engine, with a message that says why."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Start
from served import make_model, options, outcome

from pyvmem.elastic.engine_source import Source, missing
from pyvmem.sglang.internals import INTERNALS


def test_all_hooks_are_in_this_version() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations
    assert missing(Source(Path(found.submodule_search_locations[0]), "sglang"), INTERNALS) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pp_size": 2}, r"pp_size=2 \(the schedulers of its ranks are in different rounds"),
        (
            {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"},
            r"hicache_io_backend=direct \(it uses cudaMemcpyAsync",
        ),
        ({"enable_hisparse": True}, "enable_hisparse"),
        (
            {"disaggregation_mode": "prefill"},
            r"disaggregation_mode=prefill \(registers or copies entire KV tensors",
        ),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode=decode"),
        ({"enable_lmcache": True}, "enable_lmcache"),
        (
            {"speculative_algorithm": "EAGLE3"},
            r"speculative_algorithm=EAGLE3 \(a draft model's KV tensors use the target's page",
        ),
        ({"pp_size": 2, "enable_pdmux": True}, "pp_size=2.*; enable_pdmux"),
    ],
)
def test_options(model: Path, tmp_path: Path, given: dict[str, Any], text: str) -> None:
    """SGLang calls the argument check after it has filled in the missing arguments."""

    def check() -> None:
        from types import SimpleNamespace

        from sglang.srt import server_args
        from sglang.srt.arg_groups import validation_hook
        from sglang.srt.plugins import load_plugins

        load_plugins()
        validation_hook.check_server_args = lambda arguments: None
        server_args.ServerArgs.check_server_args(SimpleNamespace(**options(model, **given)))

    status, found = outcome(tmp_path / "log", {}, check)
    assert status == 1
    assert re.search(f"CannotWork: VMEM_SGLANG=1 does not work with {text}", found)


def test_an_engine_of_two_stages(start: Start) -> None:
    with pytest.raises(ValueError, match="VMEM_SGLANG=1 does not work with pp_size=2"):
        start(pp_size=2)


def test_a_draft_model(start: Start, model: Path) -> None:
    """SGLang fills in the missing speculation options before it checks them."""
    with pytest.raises(ValueError, match="VMEM_SGLANG=1 does not work with speculative_algorithm"):
        start(
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(model),
            speculative_num_steps=2,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=3,
        )


def test_one_of_two_servers(start: Start) -> None:
    """One server of a disaggregated pair is refused before it creates a pool."""
    with pytest.raises(ValueError, match="does not work with disaggregation_mode=decode"):
        start(disaggregation_mode="decode", disaggregation_transfer_backend="fake")


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (
            "mellum",
            {},
            "SWAKVPool (sliding windows: two pools and an allocator that couples them; start it "
            "with --disable-hybrid-swa-memory",
        ),
        (
            "qwen3_next",
            {"disable_radix_cache": True, "mamba_radix_cache_strategy": "no_buffer"},
            "HybridLinearKVPool (a hybrid model: attention's pool and the states are inside",
        ),
    ],
)
def test_models_with_other_pools(
    start: Start, tmp_path: Path, kind: str, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(RuntimeError, match="scheduler died during initialization"):
        start(model_path=str(make_model(tmp_path, kind)), **given)
    log = (tmp_path / "log-0").read_text("utf-8")
    assert f"VMEM_SGLANG=1 does not work with the KV pool {text}" in log


def test_tokens_without_pages(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="scheduler died during initialization"):
        start(page_size=1)
    text = (tmp_path / "log-0").read_text("utf-8")
    assert "VMEM_SGLANG=1 does not work with page_size=1" in text
    assert "start it with --page-size 16 or more" in text


def test_a_limit_below_a_page(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="scheduler died during initialization"):
        start({"VMEM_LIMIT": "40K"})
    assert "VMEM_LIMIT=40960: page 0 and one page need 65536 bytes" in (
        tmp_path / "log-0"
    ).read_text("utf-8")


def _pool(name: str, **more: Any) -> Callable[[], None]:
    """Returns a function that creates an SGLang KV pool of the class `name`."""

    def make() -> None:
        import torch
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.plugins import load_plugins

        load_plugins()
        given = {"layer_num": 2, "device": "cpu", "enable_memory_saver": False, **more}
        getattr(memory_pool, name)(256, 16, dtype=torch.float8_e4m3fn, **given)

    return make


def _without_a_hook() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    del Scheduler.run_batch
    load_plugins()
    ServerArgs.check_server_args(None)


def _too_old() -> None:
    import sglang
    from sglang.srt.plugins import load_plugins

    sglang.__version__ = "0.5.10"
    load_plugins()


def _malformed() -> None:
    from sglang.srt.plugins import load_plugins

    os.environ["VMEM_LIMIT"] = "many"
    load_plugins()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            _pool("MLATokenToKVPoolFP4", kv_lora_rank=64, qk_rope_head_dim=16),
            "does not work with the KV pool MLATokenToKVPoolFP4 (a quantized cache",
        ),
        (
            _pool("MHATokenToKVPoolMXFP8", head_num=2, head_dim=32),
            "does not work with the KV pool MHATokenToKVPoolMXFP8 (a quantized cache",
        ),
        (_without_a_hook, "SGLang did not apply the hooks sglang.srt.managers.scheduler.Scheduler"),
        (_too_old, "sglang 0.5.10 is too old (known: 0.5.22 to 0.5.23)"),
        (_malformed, "VMEM_LIMIT='many'"),
    ],
)
def test_errors_that_stop_the_process(
    tmp_path: Path, function: Callable[[], None], text: str
) -> None:
    status, found = outcome(tmp_path / "log", {}, function)
    assert status == 1
    last = found.strip().splitlines()[-1]
    assert last.startswith("VMEM_")
    assert text in last


def test_plug_ins_that_leave_it_out() -> None:
    """Importing SGLang ends the process, because SGLang itself would not report the omission."""
    env = {**os.environ, "VMEM_SGLANG": "1", "SGLANG_PLUGINS": "other"}
    done = subprocess.run(
        [sys.executable, "-c", "import sglang.srt.utils"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 1
    assert "SGLANG_PLUGINS='other' does not name the plug-in vmem" in done.stderr


OLD = Path(__file__).resolve().parents[2] / "build" / "sglang-old" / "bin" / "python"


@pytest.mark.skipif(not OLD.exists(), reason="run scripts/sglang_setup.py old first")
def test_a_version_of_half_a_year_ago() -> None:
    """Loading plug-ins stops the process: this version lacks many symbols that the pool uses."""
    program = """
import importlib.util
print(*importlib.util.find_spec("sglang").submodule_search_locations, flush=True)
from sglang.srt.plugins import load_plugins
load_plugins()
print("it went on")
"""
    env = {**os.environ, "VMEM_SGLANG": "1"}
    done = subprocess.run(
        [OLD, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    folder, *more = done.stdout.splitlines()
    assert (done.returncode, more) == (1, []), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("VMEM_SGLANG=1: sglang 0.5.12 is too old (known: 0.5.22 to 0.5.23)")
    lacks = missing(Source(Path(folder), "sglang"), INTERNALS)
    assert len(lacks) > 30
    for name in ("PrefillBudget.check_prefill", "UnifiedRadixCache.evict_for_alloc"):
        assert any(one.startswith(name) for one in lacks)
