# SPDX-License-Identifier: MIT
"""Checks that every metric and label used by the dashboard and the alerts is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
yaml = pytest.importorskip("yaml")

from pyvmem import KVCache, KVCacheConfig  # noqa: E402
from pyvmem.ledger.control import GAUGES, unit_of  # noqa: E402
from pyvmem.telemetry import Telemetry  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "packaging" / "monitoring"
NAME = re.compile(r"\b(pyvmem_\w+|vmem:\w+)(?:\{(\w+)=\"(\w+)\"\})?")


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    alerts = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exported() -> str:
    """Returns the metrics of a cache, followed by the names of a vLLM engine's metrics."""
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=4), backend="host") as cache:
        telemetry = Telemetry()
        telemetry.add(cache, "one")
        text = telemetry.text()
    gauges = [f"vmem:{name}{unit_of(name)}" for name in GAUGES]
    return "\n".join([text, *gauges])


@pytest.mark.parametrize("expression", expressions())
def test_the_metrics_in_use_are_exported(expression: str, exported: str) -> None:
    named = NAME.findall(expression)
    assert named
    for name, label, value in named:
        lines = [line for line in exported.splitlines() if re.match(rf"{name}\b", line)]
        assert lines, name
        if label:
            assert [line for line in lines if f'{label}="{value}"' in line], (name, label, value)


def test_panels_do_not_overlap() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
