# SPDX-License-Identifier: MIT
"""Tests which page size the vLLM pool chooses for a model, and the message about it."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest

from pyvmem.elastic.choice import LARGE, SMALL, choose_page
from pyvmem.elastic.settings import Settings
from pyvmem.vllm import offload
from pyvmem.vllm.worker import ElasticWorker

pytest.importorskip("torch")

G = 1 << 30
LLAMA = [64 << 10] * 32  # Llama-3-8B: bytes per layer of a 16-token block
QWEN = [64 << 10] * 36  # Qwen3-4B


@pytest.mark.parametrize(
    ("block", "most", "page", "text"),
    [
        (LLAMA, 48 * G, LARGE, "up to 48.0G can be mapped, and .* attention take up to 1.07"),
        (QWEN, 9 * G, LARGE, "up to 1.07 times"),
        (QWEN, 8 * G, SMALL, "up to 8.0G can be mapped, and up to 8.0G small pages cost no time"),
        (QWEN, 1 * G, SMALL, "small pages cost no time"),
        ([sum(LLAMA)], 48 * G, LARGE, "a block fills them"),
        ([sum(LLAMA)], 1 * G, LARGE, "a block fills them"),
        ([sum(QWEN)], 48 * G, LARGE, "attention take 3.4 to 6.3 times"),
        ([sum(QWEN)], 1 * G, SMALL, "cost no time"),
        ([16 << 10] * 80, 40 * G, LARGE, "up to 1.07 times"),  # Llama-3-70B on four GPUs
        ([4 << 10] * 126, 9 * G, SMALL, "of which a page of 2 MB in every tensor is 252.0M"),
    ],
)
def test_page(block: list[int], most: int, page: int, text: str) -> None:
    blocks = 60 * G // sum(block)
    found, why = choose_page(blocks, [one * blocks for one in block], most, 0, None)
    assert found == page
    assert re.search(text, why), why


def test_the_variable_overrides_the_choice() -> None:
    sizes = [one * 1000 for one in QWEN]
    assert choose_page(1000, sizes, 60 * G, 128 << 10, None)[0] == 128 << 10
    assert choose_page(1000, sizes, 1 * G, LARGE, 72 << 20)[0] == LARGE
    text = (
        r"VMEM_PAGE_SIZE=2097152: a page in each of 36 KV tensors is 75497472 bytes, which is "
        r"more than VMEM_LIMIT=75497471"
    )
    with pytest.raises(ValueError, match=text):
        choose_page(1000, sizes, 1 * G, LARGE, (72 << 20) - 1)


# ---- the worker ----------------------------------------------------------------------------------


class Base:
    """Mimics the part of vLLM's worker that opens the memory."""

    rank = 0
    device = SimpleNamespace(type="cpu", index=None)


class Worker(ElasticWorker, Base):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings


@pytest.mark.parametrize(
    ("block", "settings", "page", "text"),
    [
        (SMALL, Settings(), SMALL, "2 KV tensors on pages of 64.0K: up to 1.0M can be mapped"),
        (LARGE, Settings(), LARGE, "2 KV tensors on pages of 2.0M: a block fills them"),
        (SMALL, Settings(page_size=LARGE), LARGE, "pages of 2.0M: VMEM_PAGE_SIZE says so"),
        (SMALL, Settings(page_size=4096), 4096, "pages of 4.0K: VMEM_PAGE_SIZE says so"),
    ],
)
def test_the_worker_uses_and_logs_these_pages(
    caplog: pytest.LogCaptureFixture, block: int, settings: Settings, page: int, text: str
) -> None:
    with caplog.at_level("INFO", "vllm.vmem"):
        memory = Worker(dataclasses.replace(settings, backend="host"))._open(8, [8 * block] * 2)
    assert memory.geometry.page_size == page
    assert [one for one in caplog.messages if text in one]
    memory.close()


def test_a_page_size_that_the_limit_excludes() -> None:
    settings = Settings(backend="host", page_size=LARGE, limit=3 << 20)
    with pytest.raises(ValueError, match="VMEM_PAGE_SIZE=2097152: a page in each of 2 KV tensors"):
        Worker(settings)._open(8, [8 * SMALL] * 2)


# ---- addresses -----------------------------------------------------------------------------------


def _configs(*backends: str) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Returns vLLM's configurations for a model with one layer per attention back end; the layer
    `elsewhere` is not in this process.
    """

    def layer(name: str) -> SimpleNamespace:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))

    layers = {f"layer.{number}": layer(name) for number, name in enumerate(backends)}
    context = SimpleNamespace(static_forward_context=layers)
    groups = [SimpleNamespace(layer_names=[name]) for name in ("elsewhere", *layers)]
    return SimpleNamespace(compilation_config=context), SimpleNamespace(kv_cache_groups=groups)


def test_back_ends_that_may_reject_plain_addresses() -> None:
    """Triton's launcher asks CUDA about each pointer; untested back ends may do so too."""
    from pyvmem.vllm.allocation import backends_refusing_plain

    assert backends_refusing_plain(*_configs("FLASH_ATTN", "FLASHINFER", "FLASH_ATTN_MLA")) == []
    found = backends_refusing_plain(*_configs("TRITON_ATTN", "FLASH_ATTN", "GDN_ATTN", "GDN_ATTN"))
    assert found == ["GDN_ATTN", "TRITON_ATTN"]


@pytest.mark.parametrize(
    ("kernels", "device", "visible"),
    [("GDN_ATTN", "cuda", True), ("GDN_ATTN", "cpu", False), ("FLASH_ATTN", "cuda", False)],
)
def test_the_worker_asks_for_addresses_that_they_take(
    monkeypatch: pytest.MonkeyPatch, kernels: str, device: str, visible: bool
) -> None:
    from pyvmem.vllm import allocation

    asked = []

    class Opens(Base):
        def initialize_from_config(self, _: object) -> None:
            asked.append(self._settings.visible)  # type: ignore[attr-defined]

    class Placed(ElasticWorker, Opens):
        def __init__(self) -> None:
            self._settings = Settings(backend="host")

    answers = SimpleNamespace(check=lambda: None)
    monkeypatch.setattr(allocation, "place_tensors", lambda *_: (None, answers))
    monkeypatch.setattr(offload, "clear", lambda: None)
    monkeypatch.setattr(offload, "count_by", lambda *_: None)
    worker = Placed()
    worker.device = SimpleNamespace(type=device, index=0)
    worker.vllm_config, groups = _configs("FLASH_ATTN", kernels)
    worker.initialize_from_config(groups)
    assert asked == [visible]
