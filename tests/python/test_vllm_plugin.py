# SPDX-License-Identifier: MIT
"""Checks that the vLLM plug-in names the versions, settings and variables that it rejects."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

import pyvmem_vllm
from pyvmem.elastic import metrics
from pyvmem.elastic.settings import Settings
from pyvmem.elastic.versions import UnknownVersion
from pyvmem.errors import NotSupported
from pyvmem.ledger.accounts import EngineInfo, Ledger
from pyvmem.plumbing.units import parse_bytes
from pyvmem.vllm import plugin
from pyvmem.vllm.plugin import CannotWork, configure
from pyvmem.vllm.versions import KNOWN, VERSIONS
from pyvmem.vllm.worker import ElasticWorker

# ---- the device ------------------------------------------------------------------------------


def test_a_gpu_in_mig_mode_is_rejected_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    monkeypatch.setenv("VMEM_LEDGER", "off")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    class Worker:
        cache_config = SimpleNamespace(gpu_memory_utilization=0.9)

        def init_device(self) -> None:
            self.device = SimpleNamespace(type="cuda", index=0)

    class Elastic(ElasticWorker, Worker):
        pass

    with pytest.raises(NotSupported, match=f"^{name}: the GPU is in MIG mode"):
        Elastic().init_device()
    name = "NVIDIA H100 80GB HBM3"
    Elastic().init_device()


def test_memory_of_other_engines_does_not_count_during_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM compares the current free memory with the free memory before the weights were loaded."""
    torch = pytest.importorskip("torch")
    device, total, given = "GPU-8f2c", 100 << 20, 0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    properties = SimpleNamespace(uuid=device.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("VMEM_LEDGER", str(tmp_path))
    tmp_path.chmod(0o700)

    def snapshot() -> SimpleNamespace:
        free = total - other.used - given
        cuda = total - free
        return SimpleNamespace(free_memory=free, cuda_memory=cuda, non_torch_memory=cuda)

    class Worker:
        cache_config = SimpleNamespace(gpu_memory_utilization=0.9)

        def init_device(self) -> None:
            self.device = SimpleNamespace(type="cuda", index=0)
            self.init_snapshot = snapshot()

        def determine_available_memory(self) -> int:
            before, now = self.init_snapshot, snapshot()
            assert before.free_memory >= now.free_memory, "Error in memory profiling"
            assert now.non_torch_memory - before.non_torch_memory == given
            return before.free_memory - now.free_memory

    class Elastic(ElasticWorker, Worker):
        pass

    with Ledger(device, folder=tmp_path) as ledger:
        other = ledger.join("other", floor=0, limit=total, least=0, virtual=total)
        assert other.take(40 << 20)
        for change in (-40 << 20, 30 << 20, 0):
            worker = Elastic()
            worker.init_device()
            if change < 0:
                other.give(-change)
            else:
                assert other.take(change)
            given = 5 << 20  # counted as the worker's weights
            assert worker.determine_available_memory() == given
            given = 0
        other.close()


def test_a_step_without_requests_uses_no_block_of_an_ended_request() -> None:
    """In data parallelism, runner V2 of 0.26 reads whatever its tables last contained."""
    torch = pytest.importorskip("torch")
    tables = [torch.tensor([[7, 8], [9, 0]], dtype=torch.int32) for _ in range(2)]
    seen = []

    class Worker:
        model_runner = SimpleNamespace(block_tables=SimpleNamespace(input_block_tables=tables))

        def execute_dummy_batch(self) -> None:
            seen.append([int(table.abs().sum()) for table in tables])

    class Elastic(ElasticWorker, Worker):
        pass

    Elastic().execute_dummy_batch()
    Elastic.model_runner = SimpleNamespace()  # runner V1, which clears its own tables
    Elastic().execute_dummy_batch()
    assert seen == [[0, 0]] * 2


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.27.1", "0.27.0+cpu", "0.26.2.dev3", *(f"{one}.0" for one in KNOWN)]
)
def test_known_versions(version: str) -> None:
    VERSIONS.check(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.2.6", "0.9"])
def test_an_old_version_is_rejected_in_one_line(version: str) -> None:
    with pytest.raises(UnknownVersion) as caught:
        VERSIONS.check(version)
    text = str(caught.value)
    assert f"vllm {version} is too old (known: 0.26 to 0.33)" in text
    assert "unset VMEM_VLLM" in text
    assert "\n" not in text


NEWER = ["0.34.0", "0.260.0", "1.0", "dev"]


@pytest.mark.parametrize("version", NEWER)
def test_an_unknown_version_with_missing_names_is_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    lacks = ("Scheduler.schedule (vllm.v1.core.sched.scheduler)", "KVCacheBlock.ref_cnt (vllm...)")
    monkeypatch.setattr(VERSIONS, "lacks", lacks)
    with pytest.raises(UnknownVersion) as caught:
        VERSIONS.check(version, warn=True)
    text = str(caught.value)
    assert f"vllm {version} is not known to this pyvmem (known: 0.26 to 0.33), and lacks" in text
    assert ", ".join(lacks) in text
    assert "\n" not in text


@pytest.mark.parametrize("version", NEWER)
def test_an_unknown_version_that_has_everything_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(VERSIONS, "lacks", ())
    monkeypatch.setattr(VERSIONS, "_tried", set())
    VERSIONS.check(version)
    assert not caplog.records
    for _ in range(2):
        VERSIONS.check(version, warn=True)
    (record,) = caplog.records
    assert f"vllm {version} was never tested with this pyvmem" in record.getMessage()


def test_every_version_names_its_evidence() -> None:
    assert all(KNOWN.values())
    assert list(KNOWN) == sorted(KNOWN)


def with_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """Creates a package that looks like vLLM to `register`."""

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

    class Executor:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

    vllm, engine, arg_utils = (ModuleType(name) for name in ("vllm", "engine", "arg_utils"))
    vllm.__spec__ = ModuleSpec("vllm", None, is_package=True)  # a package without source code
    executor = ModuleType("abstract")
    executor.Executor = Executor  # type: ignore[attr-defined]
    for name in ("vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.abstract", executor)
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
    """When the plug-in is off, `register` does not even read the other variables."""
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
def test_register_rejects_malformed_variables(
    monkeypatch: pytest.MonkeyPatch, switch: str, limit: str, text: str
) -> None:
    monkeypatch.setenv("VMEM_VLLM", switch)
    monkeypatch.setenv("VMEM_LIMIT", limit)
    with_vllm(monkeypatch, "0.27.0")
    with pytest.raises(ValueError, match=text):
        plugin.register()


def test_register_rejects_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_executor_checks_a_configuration_made_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise such an engine would silently run stock vLLM."""
    monkeypatch.setenv("VMEM_VLLM", "1")
    with_vllm(monkeypatch, "0.33.0")
    plugin.register()
    executor = sys.modules["vllm.v1.executor.abstract"].Executor
    made = executor(config()).vllm_config
    assert made.parallel_config.worker_cls == "pyvmem.vllm.worker.ElasticCPUWorker"
    assert made.scheduler_config.scheduler_cls == "pyvmem.vllm.scheduler.ElasticScheduler"
    instance = made.instance_id
    assert executor(vllm_config=made).vllm_config.instance_id == instance, "unchanged"
    with pytest.raises(CannotWork, match="enable_dbo"):
        executor(config(parallel_config__enable_dbo=True))
    monkeypatch.setenv("VMEM_VLLM", "0")
    assert executor(config()).vllm_config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("names", ["a,b", "", "vmem2", "a, vmem"])
def test_plug_in_lists_without_ours(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VLLM_PLUGINS", names)
    text = f"^VMEM_VLLM=1 has no effect, since VLLM_PLUGINS='{names}' does not name"
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.warns(UserWarning, match=text):
        pyvmem_vllm.check_plugins()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(RuntimeError, match=text):
        pyvmem_vllm.check_plugins()


@pytest.mark.parametrize(("switch", "names"), [("1", "a,vmem"), ("1", None), ("0", "a"), ("", "a")])
def test_plug_in_lists_with_ours(
    monkeypatch: pytest.MonkeyPatch, switch: str, names: str | None
) -> None:
    monkeypatch.setenv("VMEM_VLLM", switch)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyvmem_vllm.check_plugins()


# ---- configurations ------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    """Returns the part of a VllmConfig that is used; changes are given as section__field=value."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", distributed_executor_backend="uni"
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        kv_transfer_config=None,
        instance_id="abcde",
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(made, section) if field else made, field or section, value)
    return made


def test_changes_to_a_configuration() -> None:
    made = config(
        parallel_config__worker_cls="vllm.v1.worker.gpu_worker.Worker",
        scheduler_config__async_scheduling=True,
    )
    configure(made)
    assert made.parallel_config.worker_cls == "pyvmem.vllm.worker.ElasticGPUWorker"
    assert made.scheduler_config.scheduler_cls == "pyvmem.vllm.scheduler.ElasticAsyncScheduler"
    assert made.instance_id.startswith("abcde-")


def test_sleep_mode_uses_our_allocator() -> None:
    made = config(model_config__enable_sleep_mode=True, model_config__sleep_mode_backend="cumem")
    configure(made)
    assert made.model_config.sleep_mode_backend == "vmem"


LAUNCHED = {"parallel_config__distributed_executor_backend": "external_launcher"}
MOONCAKE = {
    "kv_connector": "MooncakeConnector",
    "kv_connector_module_path": None,
    "kv_connector_extra_config": {},
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_transfer_config": SimpleNamespace(**MOONCAKE)}, "kv_connector=MooncakeConnector"),
        ({"parallel_config__enable_dbo": True}, "enable_dbo"),
        (
            {**LAUNCHED, "parallel_config__tensor_parallel_size": 2},
            "backend=external_launcher with 2 ranks .each has its own scheduler",
        ),
        (
            {
                **LAUNCHED,
                "parallel_config__tensor_parallel_size": 2,
                "parallel_config__pipeline_parallel_size": 3,
            },
            "backend=external_launcher with 6 ranks ",
        ),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            "prefill_context_parallel_size=2 .*MLA",
        ),
        ({"parallel_config__worker_cls": "my.Worker"}, "worker_cls=my.Worker"),
        ({"scheduler_config__scheduler_cls": "my.Scheduler"}, "scheduler_cls"),
        (
            {"model_config": SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="criu")},
            "sleep_mode_backend=criu",
        ),
    ],
)
def test_unsupported_options_are_named(change: dict[str, Any], text: str) -> None:
    made = config(**change)
    with pytest.raises(CannotWork, match=text):
        configure(made)
    assert made.instance_id == "abcde"


@pytest.mark.parametrize(
    "change",
    [
        {"parallel_config__data_parallel_size": 4},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__distributed_executor_backend": "ray"},
        {"parallel_config__distributed_executor_backend": "my.Executor"},
        {**LAUNCHED, "parallel_config__data_parallel_size": 2},
    ],
)
def test_supported_options(change: dict[str, Any]) -> None:
    made = config(**change)
    configure(made)
    assert made.parallel_config.worker_cls == "pyvmem.vllm.worker.ElasticCPUWorker"


def test_each_rank_of_data_parallelism_is_on_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    known: set[int] = {0}  # no collector is registered if an engine is already known
    monkeypatch.setattr(metrics, "_identities", known)
    made = config(
        parallel_config__data_parallel_size=3,
        parallel_config__data_parallel_index=1,
    )
    configure(made)
    wanted = {metrics.identity_of(made.instance_id, one) for one in range(3)}
    assert len(wanted) == 3
    assert known == {0} | wanted


def test_api_servers_show_the_engine_whose_processes_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each API server creates its own configuration but must get its engine's instance id; a second
    engine in the process gets a different id.
    """
    monkeypatch.setenv(plugin._INSTANCE, "of an engine before")
    sizes = {"parallel_config___api_process_count": 2}
    first, *servers = (config(**sizes, parallel_config___api_process_rank=n) for n in (-1, 0, 1))
    other = config(parallel_config___api_process_count=1, parallel_config___api_process_rank=0)
    for one in (first, *servers, other):
        configure(one)
    assert first.instance_id.startswith("abcde-")
    assert [one.instance_id for one in servers] == [first.instance_id] * 2
    assert other.instance_id != first.instance_id


def test_metrics_of_several_api_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several API servers, metrics are read from files, not from a process's registry."""
    client = pytest.importorskip("prometheus_client")

    class OfFiles:
        def collect(self) -> Iterator[Any]:
            yield client.metrics_core.GaugeMetricFamily("vllm:other", "", value=1)

    numbers = {field.name: 5 for field in dataclasses.fields(EngineInfo)}
    one = EngineInfo(**{**cast(Any, numbers), "name": "m", "identity": 7})
    monkeypatch.setattr(metrics, "engines_in", lambda folder: {"host": [one]})
    monkeypatch.setattr(metrics, "_identities", {7})
    registry = client.CollectorRegistry()
    metrics._add_to(OfFiles)
    registry.register(OfFiles())
    lines = client.generate_latest(registry).decode().splitlines()
    assert lines.count('vmem:used_bytes{device="host",engine="m"} 5.0') == 1
    assert lines.count("vllm:other 1.0") == 1


def test_all_reasons_at_once() -> None:
    transfer = SimpleNamespace(**MOONCAKE)
    with pytest.raises(CannotWork, match=r"connector.*enable_dbo"):
        configure(config(kv_transfer_config=transfer, parallel_config__enable_dbo=True))


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
        *("\uff12\uff10G", "20\u212a"),  # full-width digits, and the kelvin sign
    ],
)
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="VMEM_LIMIT="):
        parse_bytes(text, "VMEM_LIMIT")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"VMEM_LIMIT": "much"}, "VMEM_LIMIT='much': expected a size"),
        ({"VMEM_LIMIT": "1G", "VMEM_FLOOR": "2G"}, "is below VMEM_FLOOR=2147483648"),
        ({"VMEM_PAGE_SIZE": "96K"}, "VMEM_PAGE_SIZE=98304: expected a power of two"),
        (
            {"VMEM_PAGE_SIZE": "2M", "VMEM_LIMIT": "1M"},
            "VMEM_LIMIT=1048576 is less than a page, VMEM_",
        ),
        ({"VMEM_PAGE_SIZE": "1"}, "VMEM_PAGE_SIZE=1: expected a power of two from 4096 to 1073741"),
        ({"VMEM_PAGE_SIZE": "8T"}, "VMEM_PAGE_SIZE=8796093022208: expected a power of two"),
        ({"VMEM_BACKEND": "nonsense"}, "VMEM_BACKEND='nonsense': expected one of auto, .*host"),
        ({"VMEM_IDLE": "1_0"}, "VMEM_IDLE='1_0': expected seconds"),
        ({"VMEM_IDLE": "\uff11"}, "expected seconds"),
        ({"VMEM_IDLE": "soon"}, "VMEM_IDLE='soon': expected seconds"),
        ({"VMEM_IDLE": "-1"}, "VMEM_IDLE='-1': expected seconds"),
        ({"VMEM_NAME": "a b"}, "VMEM_NAME='a b': expected 1 to 63 letters"),
        ({"VMEM_NAME": "\u00e9" * 63}, "expected 1 to 63 letters"),
        ({"VMEM_HOST_LIMIT": "most"}, "VMEM_HOST_LIMIT='most': expected a size"),
        (
            {"VMEM_HOST_LIMIT": "1G", "VMEM_LEDGER": "off"},
            "VMEM_HOST_LIMIT=1073741824: VMEM_LEDGER=off",
        ),
    ],
)
def test_malformed_variables(env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings.read(env)


def test_an_unsupported_page_size() -> None:
    pytest.importorskip("torch")
    from pyvmem.elastic.memory import open_context

    text = r"VMEM_PAGE_SIZE=4194304: expected one of 4096, .*2097152, with VMEM_BACKEND=host"
    with pytest.raises(ValueError, match=text):
        open_context("host", 0, 4 << 20, 0)
    with open_context("host", 0, 4096, 0) as context:
        assert context.info.granule == 4096


@pytest.mark.parametrize("name", ["VMEM_LIMIT", "VMEM_FLOOR"])
def test_more_than_device_memory(name: str) -> None:
    settings = Settings.read({name: "2G"})
    settings.check_device(2 << 30)
    with pytest.raises(
        ValueError, match=f"{name}={2 << 30} exceeds the device's {(2 << 30) - 1} bytes"
    ):
        settings.check_device((2 << 30) - 1)


def test_defaults() -> None:
    assert Settings.read({}) == Settings()
    for off in ("off", "OFF"):
        assert Settings.read({"VMEM_LEDGER": off}).ledger is None
    assert Settings.read({"VMEM_LEDGER": "~/l"}).ledger == os.path.expanduser("~/l")
    with pytest.raises(ValueError, match=r"VMEM_LEDGER=~no-such-user/l: .* home"):
        Settings.read({"VMEM_LEDGER": "~no-such-user/l"})
    assert Settings.read({"VMEM_BACKEND": "auto"}).backend == ""
