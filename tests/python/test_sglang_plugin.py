# SPDX-License-Identifier: MIT
"""Tests the SGLang plug-in's entry points, versions and options, without SGLang installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import pyvmem_sglang
from pyvmem.elastic.versions import UnknownVersion
from pyvmem.sglang.buffers import _plain
from pyvmem.sglang.reasons import (
    CannotWork,
    reason_against_allocator,
    reason_against_pool,
    reasons_against,
)
from pyvmem.sglang.versions import VERSIONS


@pytest.mark.parametrize("switch", ["", "0"])
def test_register_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("VMEM_SGLANG", switch)
    pyvmem_sglang.register()
    pyvmem_sglang.check_plugins()


def test_an_entry_point_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would log an exception and continue without the plug-in."""
    monkeypatch.setenv("VMEM_SGLANG", "1")
    monkeypatch.setitem(__import__("sys").modules, "sglang", None)
    with pytest.raises(SystemExit, match="VMEM_SGLANG=1: ModuleNotFoundError"):
        pyvmem_sglang.register()


def test_plug_in_lists_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMEM_SGLANG", "1")
    for names in ("", "vmem", "other, vmem"):
        monkeypatch.setenv("SGLANG_PLUGINS", names)
        pyvmem_sglang.check_plugins()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.warns(UserWarning, match="does not name the plug-in vmem"):
        pyvmem_sglang.check_plugins()
    monkeypatch.setitem(__import__("sys").modules, "sglang", SimpleNamespace())
    with pytest.raises(RuntimeError, match="does not name the plug-in vmem"):
        pyvmem_sglang.check_plugins()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23.post1"])
def test_a_known_version(version: str) -> None:
    VERSIONS.check(version)


def test_an_unknown_version_is_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnknownVersion, match=r"sglang 0\.5\.21 is too old \(known: 0\.5"):
        VERSIONS.check("0.5.21")
    monkeypatch.setattr(VERSIONS, "lacks", ("Scheduler.run_batch (sglang.srt)",))
    with pytest.raises(UnknownVersion, match=r"lacks Scheduler\.run_batch"):
        VERSIONS.check("0.6.0")
    monkeypatch.setattr(VERSIONS, "lacks", ())
    monkeypatch.setattr(VERSIONS, "_tried", set())
    VERSIONS.check("0.6.0", warn=True)
    VERSIONS.check("0.6.0", warn=True)
    assert len(caplog.records) == 1
    assert "sglang 0.6.0 was never tested" in caplog.text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"tp_size": 1, "pp_size": 1, "disaggregation_mode": "null"}, []),
        ({"enable_hierarchical_cache": True, "hicache_io_backend": "kernel"}, []),
        ({"hicache_io_backend": "direct"}, []),
        ({"tp_size": 8}, []),
        (
            {"tp_size": 2, "pp_size": 4, "disaggregation_mode": "decode"},
            ["pp_size=4", "disaggregation_mode=decode"],
        ),
        (
            {"attn_cp_size": 2, "dcp_size": 2, "enable_dp_attention": True},
            ["attn_cp_size=2", "dcp_size=2", "enable_dp_attention"],
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"},
            ["hicache_io_backend=direct"],
        ),
        (
            {"speculative_algorithm": "EAGLE", "enable_lmcache": True, "enable_flexkv": True},
            ["speculative_algorithm=EAGLE", "enable_lmcache", "enable_flexkv"],
        ),
        (
            {"enable_hisparse": True, "enable_unified_memory": True, "enable_pdmux": True},
            ["enable_hisparse", "enable_unified_memory", "enable_pdmux"],
        ),
        ({"enable_kv_cache_sharding": True}, ["enable_kv_cache_sharding"]),
    ],
)
def test_options_that_exclude_it(given: dict[str, object], named: list[str]) -> None:
    found = list(reasons_against(SimpleNamespace(**given)))
    assert [one.partition(" (")[0] for one in found] == named
    assert all(one.endswith(")") for one in found)
    assert str(CannotWork(*found)) == "VMEM_SGLANG=1 does not work with " + "; ".join(found)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("MLATokenToKVPoolFP4", "a quantized cache"),
        ("DSATokenToKVPool", "latent attention with an index"),
        ("PageInterleaveMLATokenToKVPool", "a cache sharded over ranks"),
        ("MHATokenToKVPoolFP4", "a quantized cache"),
        ("MHATokenToKVPoolMXFP8", "a quantized cache: scales in other"),
        ("SWAKVPool", "sliding windows"),
        ("HybridLinearKVPool", "a hybrid model"),
        ("PageMajorMHATokenToKVPool", "the layers of a page are together"),
        ("SomethingNew", "it has other buffers"),
    ],
)
def test_pools_that_are_rejected(name: str, why: str) -> None:
    found = reason_against_pool(type(name, (), {"page_size": 16})())
    assert found is not None
    assert found.startswith(f"the KV pool {name} ({why}")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, None),
        ({"kv_cache_layout": "hnd"}, None),
        ({"page_size": 1}, "page_size=1"),
        ({"post_capture_active": True}, "KV sizing after graph capture"),
        ({"enable_custom_mem_pool": True}, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        ({"kv_cache_layout": "vectorized_5d"}, "the KV layout vectorized_5d"),
    ],
)
def test_states_of_the_pools_that_work(given: dict[str, object], text: str | None) -> None:
    for name in ("MHATokenToKVPool", "MLATokenToKVPool"):
        found = reason_against_pool(type(name, (), {"page_size": 16, **given})())
        assert (found is None) == (text is None)
        assert found is None or found.startswith(text or "")


def test_an_unsupported_allocator() -> None:
    ours = type("Ours", (), {})
    assert reason_against_allocator(ours(), ours) is None
    other = type("SWATokenToKVPoolAllocator", (), {})()
    assert "the allocator SWATokenToKVPoolAllocator" in str(reason_against_allocator(other, ours))


@pytest.mark.parametrize(
    ("tensors", "backends", "plain"),
    [
        ({"k_buffer", "v_buffer"}, ("fa3", "fa3"), True),
        ({"k_buffer", "v_buffer"}, ("fa3", "triton"), False),
        ({"k_buffer", "v_buffer"}, ("torch_native", "torch_native"), False),
        ({"kv_buffer"}, ("fa3", "fa3"), False),
    ],
)
def test_kernels_that_accept_plain_addresses(
    tensors: set[str], backends: tuple[str, str], plain: bool
) -> None:
    """Triton's launcher asks CUDA about each pointer; a Triton kernel writes the rows of latent
    attention.
    """
    assert _plain(tensors, backends) is plain
