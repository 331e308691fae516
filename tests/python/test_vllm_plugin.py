# SPDX-License-Identifier: MIT
"""Description: what the vLLM plug-in refuses, by name: versions, configurations, variables."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from pyvmem.errors import NotSupported
from pyvmem.units import parse_bytes
from pyvmem.vllm import plugin
from pyvmem.vllm.plugin import CannotWork, configure
from pyvmem.vllm.settings import Settings
from pyvmem.vllm.versions import ADAPTERS, UnknownVersion, adapter_of
from pyvmem.vllm.worker import ElasticWorker

# ---- the device ------------------------------------------------------------------------------


def test_a_gpu_in_mig_mode_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    class Worker:
        cache_config = SimpleNamespace(gpu_memory_utilization=0.9)

        def init_device(self) -> None:
            self.device = SimpleNamespace(type="cuda", index=0)

    class Elastic(ElasticWorker, Worker):
        pass

    with pytest.raises(NotSupported, match=f"^{name}: a GPU in MIG mode"):
        Elastic().init_device()
    name = "NVIDIA H100 80GB HBM3"
    Elastic().init_device()


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.27.0+cpu", "0.26.2.dev3", "0.32.0"])
def test_known_versions(version: str) -> None:
    assert version.startswith(adapter_of(version).version)


@pytest.mark.parametrize(
    "version", ["0.25.9", "0.2.6", "0.260.0", "0.28.0", "0.31.0", "0.33.0", "1.0", "dev"]
)
def test_another_version_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(UnknownVersion) as caught:
        adapter_of(version)
    text = str(caught.value)
    assert f"vllm {version} is not known" in text
    assert "known: 0.26, 0.27, 0.32" in text
    assert "unset VMEM_VLLM" in text
    assert "\n" not in text


def test_every_adapter_says_what_shows_that_it_works() -> None:
    assert all(one.evidence for one in ADAPTERS)


@pytest.mark.parametrize(
    ("tensors", "layout", "text"),
    [
        ([(64, False), (64, True)], "LBHNC", "KV tensors in host memory"),
        ([(64, False), (64, False)], "LHBNC", r"layout LHBNC and layers of \[64\] bytes"),
        ([(64, False), (32, False)], "LBHNC", r"layers of \[32, 64\] bytes; .*BLHNC"),
    ],
)
def test_layouts_of_one_buffer_that_are_refused(
    tensors: list[tuple[int, bool]], layout: str, text: str
) -> None:
    """0.32 has all layers in one buffer, in an order that the user may choose."""
    some = [SimpleNamespace(layer_stride=size, host_resident=host) for size, host in tensors]
    order = SimpleNamespace(
        name=layout, is_block_outermost=layout[0] == "B", is_block_compact="B" in layout[:2]
    )

    def never(*_: Any) -> Any:
        raise AssertionError

    found = SimpleNamespace(num_blocks=4, kv_cache_tensors=some)
    with pytest.raises(NotImplementedError, match=text):
        adapter_of("0.32.0").make(never, never, found, "cpu", order)


def with_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """A package that looks like vLLM as far as `register` looks."""

    class EngineArgs:
        def create_engine_config(self) -> Any:
            return config()

    class SleepModeBackendFactory:
        known: ClassVar[list[str]] = ["cumem"]

        @classmethod
        def register_backend(cls, name: str, module: str, what: str) -> None:
            if name in cls.known:
                raise ValueError(f"{name} is registered")
            cls.known.append(name)

    vllm, engine, arg_utils = (ModuleType(name) for name in ("vllm", "engine", "arg_utils"))
    sleep = ModuleType("sleep_mode_backend")
    sleep.SleepModeBackendFactory = SleepModeBackendFactory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", ModuleType("device_allocator"))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", sleep)
    vllm.__version__ = version  # type: ignore[attr-defined]
    arg_utils.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.engine", engine)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arg_utils)
    return EngineArgs


@pytest.mark.parametrize("switch", ["", "0"])
def test_register_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """Nor does it mind what the other variables say."""
    monkeypatch.setenv("VMEM_VLLM", switch)
    monkeypatch.setenv("VMEM_LIMIT", "much")
    args = with_vllm(monkeypatch, "9.9")
    original = args.create_engine_config
    plugin.register()
    assert args.create_engine_config is original


@pytest.mark.parametrize(
    ("switch", "limit", "text"),
    [
        ("yes", "1G", "VMEM_VLLM='yes': expected 1 or 0"),
        ("1", "much", "VMEM_LIMIT='much': expected a size"),
    ],
)
def test_register_refuses_malformed_variables(
    monkeypatch: pytest.MonkeyPatch, switch: str, limit: str, text: str
) -> None:
    monkeypatch.setenv("VMEM_VLLM", switch)
    monkeypatch.setenv("VMEM_LIMIT", limit)
    with_vllm(monkeypatch, "0.27.0")
    with pytest.raises(ValueError, match=text):
        plugin.register()


def test_register_refuses_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMEM_VLLM", "1")
    args = with_vllm(monkeypatch, "0.99.0")
    original = args.create_engine_config
    with pytest.raises(UnknownVersion, match=r"0\.99\.0"):
        plugin.register()
    assert args.create_engine_config is original


def test_register_twice_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMEM_VLLM", "1")
    args = with_vllm(monkeypatch, "0.27.0")
    plugin.register()
    once = args.create_engine_config
    plugin.register()
    assert args.create_engine_config is once
    made = args().create_engine_config()
    assert made.parallel_config.worker_cls == "pyvmem.vllm.worker.ElasticCPUWorker"
    assert made.scheduler_config.scheduler_cls == "pyvmem.vllm.scheduler.ElasticScheduler"


def test_the_variable_counts_for_each_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMEM_VLLM", "1")
    args = with_vllm(monkeypatch, "0.27.0")
    plugin.register()
    monkeypatch.delenv("VMEM_VLLM")
    made = args().create_engine_config()
    assert made.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert made.scheduler_config.scheduler_cls is None


# ---- configurations ------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as is looked at; changes: section__field=value."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", distributed_executor_backend="uni"
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        kv_transfer_config=None,
        instance_id="abcde",
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(made, section) if field else made, field or section, value)
    return made


def test_what_is_put_into_a_configuration() -> None:
    made = config(
        parallel_config__worker_cls="vllm.v1.worker.gpu_worker.Worker",
        scheduler_config__async_scheduling=True,
    )
    configure(made)
    assert made.parallel_config.worker_cls == "pyvmem.vllm.worker.ElasticGPUWorker"
    assert made.scheduler_config.scheduler_cls == "pyvmem.vllm.scheduler.ElasticAsyncScheduler"
    assert made.instance_id.startswith("abcde-")


def test_sleep_mode_sleeps_by_ours() -> None:
    made = config(model_config__enable_sleep_mode=True, model_config__sleep_mode_backend="cumem")
    configure(made)
    assert made.model_config.sleep_mode_backend == "vmem"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"cache_config__kv_offloading_size": 4.0}, "kv_offloading_size"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__data_parallel_size": 4}, "data_parallel_size=4"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"parallel_config__enable_dbo": True}, "enable_dbo"),
        ({"parallel_config__distributed_executor_backend": "ray"}, "backend=ray"),
        ({"parallel_config__worker_cls": "my.Worker"}, "worker_cls=my.Worker"),
        ({"scheduler_config__scheduler_cls": "my.Scheduler"}, "scheduler_cls"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        (
            {
                "model_config": SimpleNamespace(
                    is_encoder_decoder=False, enable_sleep_mode=True, sleep_mode_backend="criu"
                )
            },
            "sleep_mode_backend=criu",
        ),
        ({"model_config__has_inner_state": True}, "inner state"),
    ],
)
def test_what_cannot_work_is_named(change: dict[str, Any], text: str) -> None:
    made = config(**change)
    with pytest.raises(CannotWork, match=text):
        configure(made)
    assert made.instance_id == "abcde"


def test_all_reasons_at_once() -> None:
    with pytest.raises(CannotWork, match=r"connector.*enable_dbo"):
        configure(config(kv_transfer_config=object(), parallel_config__enable_dbo=True))


# ---- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0), ("4096", 4096), ("20G", 20 << 30), ("1.5m", 3 << 19), (" 2 GiB", 2 << 30)),
        *(("9007199254740993", (1 << 53) + 1), ("0.1T", (1 << 40) // 10)),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "-1", "20X", "G", "1e9", "nan", "20GG", "9999999999T", "9" * 5000, "1_0"),
        *("\uff12\uff10G", "20\u212a"),  # digits of full width, the sign of kelvin
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="VMEM_LIMIT="):
        parse_bytes(text, "VMEM_LIMIT")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"VMEM_LIMIT": "much"}, "VMEM_LIMIT='much': expected a size"),
        ({"VMEM_LIMIT": "1G", "VMEM_FLOOR": "2G"}, "is below VMEM_FLOOR=2147483648"),
        ({"VMEM_PAGE_SIZE": "96K"}, "VMEM_PAGE_SIZE=98304: expected a power of two"),
        ({"VMEM_PAGE_SIZE": "1"}, "VMEM_PAGE_SIZE=1: expected a power of two from 4096 to 1073741"),
        ({"VMEM_PAGE_SIZE": "8T"}, "VMEM_PAGE_SIZE=8796093022208: expected a power of two"),
        ({"VMEM_BACKEND": "nonsense"}, "VMEM_BACKEND='nonsense': expected one of auto, .*host"),
        ({"VMEM_IDLE": "1_0"}, "VMEM_IDLE='1_0': expected seconds"),
        ({"VMEM_IDLE": "\uff11"}, "expected seconds"),
        ({"VMEM_IDLE": "soon"}, "VMEM_IDLE='soon': expected seconds"),
        ({"VMEM_IDLE": "-1"}, "VMEM_IDLE='-1': expected seconds"),
        ({"VMEM_NAME": "a b"}, "VMEM_NAME='a b': expected 1 to 63 letters"),
        ({"VMEM_NAME": "\u00e9" * 63}, "expected 1 to 63 letters"),
    ],
)
def test_malformed_variables(env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings.read(env)


def test_a_page_size_that_the_back_end_lacks() -> None:
    pytest.importorskip("torch")
    from pyvmem.vllm.memory import open_context

    text = r"VMEM_PAGE_SIZE=4194304: expected one of 4096, .*2097152, with VMEM_BACKEND=host"
    with pytest.raises(ValueError, match=text):
        open_context("host", 0, 4 << 20, 0)
    with open_context("host", 0, 4096, 0) as context:
        assert context.info.granule == 4096


@pytest.mark.parametrize("name", ["VMEM_LIMIT", "VMEM_FLOOR"])
def test_more_than_the_device_has(name: str) -> None:
    settings = Settings.read({name: "2G"})
    settings.check_device(2 << 30)
    with pytest.raises(ValueError, match=f"{name}={2 << 30}: the device has {(2 << 30) - 1} bytes"):
        settings.check_device((2 << 30) - 1)


def test_defaults() -> None:
    assert Settings.read({}) == Settings()
    for off in ("off", "OFF"):
        assert Settings.read({"VMEM_LEDGER": off}).ledger is None
    assert Settings.read({"VMEM_LEDGER": "~/l"}).ledger == os.path.expanduser("~/l")
    with pytest.raises(ValueError, match=r"VMEM_LEDGER=~no-such-user/l: .* home"):
        Settings.read({"VMEM_LEDGER": "~no-such-user/l"})
    assert Settings.read({"VMEM_BACKEND": "auto"}).backend == ""
