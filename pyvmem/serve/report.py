# SPDX-License-Identifier: MIT
"""The demonstration's result, as a dictionary for JSON and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pyvmem.kvcache import CacheStats
from pyvmem.plumbing.units import counted
from pyvmem.serve.chart import chart
from pyvmem.serve.engine import EngineStats
from pyvmem.serve.job import Completion
from pyvmem.serve.trace import Recorder
from pyvmem.serve.verify import Verdict

__all__ = ["FORMULA", "build", "page_name", "summary", "tables"]

FORMULA = (
    "sum over running requests of ceil(tokens * row / page) * page * tensors, at the largest step"
)
_MIB = 1 << 20


def page_name(size: int) -> str:
    """Formats a page size, such as "64 KiB"; "-" for 0."""
    if not size:
        return "-"
    return f"{size >> 20} MiB" if size >= _MIB else f"{size >> 10} KiB"


def _mapping(engine: EngineStats, cache: CacheStats) -> dict[str, Any]:
    return {
        "driver_calls": cache.driver_calls,
        "driver_s": cache.driver_ns / 1e9,
        "critical_driver_s": cache.critical_driver_ns / 1e9,
        "background_driver_s": cache.background_driver_ns / 1e9,
        "step_s": engine.step_s,
        "step_async_s": engine.ahead_s,
        "waits": cache.waits,
        "wait_s": cache.wait_ns / 1e9,
        "mapped_pages": cache.grown_pages,
        "reused_pages": cache.reused_pages,
        "unmapped_pages": cache.reclaimed_pages,
        "zeroed_pages": cache.zeroed_pages,
        "short": cache.short,
    }


def build(
    setting: dict[str, Any],
    prompts: Sequence[str],
    answers: Sequence[str],
    completions: Sequence[Completion],
    engine: EngineStats,
    cache: CacheStats,
    recorder: Recorder,
    verdict: Verdict | None,
) -> dict[str, Any]:
    """Builds a run's result.

    Args:
        setting: the run's settings and machine.
        prompts, answers, completions: one per request, in the same order.
        cache: the cache's statistics after the last request.
    """
    return {
        "setting": setting,
        "requests": [
            {
                "id": completion.job.request_id,
                "prompt": prompt,
                "answer": answer,
                "prompt_tokens": len(completion.job.prompt),
                "tokens": list(completion.tokens),
                "reason": completion.reason.value,
                "preemptions": completion.preemptions,
                "first_step": completion.first_step,
                "last_step": completion.last_step,
            }
            for prompt, answer, completion in zip(prompts, answers, completions, strict=True)
        ],
        "engine": asdict(engine),
        "tokens_per_s": engine.new_tokens / engine.total_s if engine.total_s else 0.0,
        "memory": {
            "measured": {
                "mapped_bytes": cache.peak_mapped_bytes,
                "used_bytes": cache.peak_used_bytes,
                "wasted_bytes": cache.peak_wasted_bytes,
            },
            "formula": FORMULA,
            "steps": recorder.curve,  # mapped and used bytes of each step, by the formula above
            "replay": [layout.footprint().as_dict() for layout in (recorder.own, *recorder.others)],
        },
        "mapping": _mapping(engine, cache),
        "cache": asdict(cache),
        "verify": verdict.as_dict() if verdict is not None else None,
    }


def _align(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Aligns columns: the first to the left, the others to the right."""
    table = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        indent
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _mib(count: int) -> str:
    return f"{count / _MIB:,.1f}"


def _memory_table(result: dict[str, Any]) -> list[str]:
    memory = result["memory"]
    own, *others = memory["replay"]
    measured = memory["measured"]
    rows = [("", "page", "tensors", "mapped", "tokens", "wasted", "wasted", "x ours")]
    rows.append(
        (
            "measured: peak of each",
            page_name(own["page_size"]),
            str(own["num_tensors"]),
            _mib(measured["mapped_bytes"]),
            _mib(measured["used_bytes"]),
            _mib(measured["wasted_bytes"]),
            "",
            "",
        )
    )
    for layout in (own, *others):
        mapped = layout["mapped_bytes"]
        rows.append(
            (
                f"replayed: {layout['name']}",
                page_name(layout["page_size"]),
                str(layout["num_tensors"]),
                _mib(mapped),
                _mib(layout["used_bytes"]),
                _mib(layout["wasted_bytes"]),
                f"{layout['wasted_bytes'] / mapped:.0%}" if mapped else "-",
                f"{mapped / own['mapped_bytes']:.1f}" if own["mapped_bytes"] else "-",
            )
        )
    return [
        "KV memory, MiB",
        *_align(rows),
        "  measured: the cache's own counters, pages kept for the next request included in mapped",
        f"  replayed: {memory['formula']};",
        "  static: the longest sequence for each running request. All rows are this run's lengths.",
    ]


def _time_table(result: dict[str, Any]) -> list[str]:
    engine, mapping = result["engine"], result["mapping"]
    rows = [
        ("in the driver, on the critical path", f"{mapping['critical_driver_s'] * 1e3:,.2f}"),
        ("in the driver, in the background", f"{mapping['background_driver_s'] * 1e3:,.2f}"),
        ("caller, before the model: admit, extend", f"{mapping['step_s'] * 1e3:,.2f}"),
        ("caller, during the model: admit, prepare", f"{mapping['step_async_s'] * 1e3:,.2f}"),
        ("model", f"{engine['model_s'] * 1e3:,.2f}"),
        *_steps(engine["model_steps_s"]),
        ("all steps", f"{engine['total_s'] * 1e3:,.2f}"),
    ]
    return [
        f"time of {engine['steps']} steps, ms",
        *_align(rows),
        f"  {mapping['driver_calls']} driver calls; pages mapped {mapping['mapped_pages']}, reused "
        f"{mapping['reused_pages']}, zeroed {mapping['zeroed_pages']}, unmapped "
        f"{mapping['unmapped_pages']}; waited {mapping['waits']} times",
    ]


def _steps(seconds: Sequence[float]) -> list[tuple[str, str]]:
    """Formats the median model step and the total for the slowest tenth (kernel compilation)."""
    if not seconds:
        return []
    slowest = sorted(seconds)[9 * len(seconds) // 10 :]
    return [
        ("  its median step", f"{statistics.median(seconds) * 1e3:,.2f}"),
        (f"  its {len(slowest)} slowest steps", f"{sum(slowest) * 1e3:,.2f}"),
    ]


def _verify_lines(result: dict[str, Any]) -> list[str]:
    verdict = result["verify"]
    if verdict is None:
        return []
    judged = "passed" if verdict["passed"] else "FAILED"
    if result["setting"]["dtype"] != "float32":
        judged = "not judged, since only float32 must match"
    lines = [
        f"against transformers' generate: {verdict['identical']} of {verdict['requests']} answers "
        f"identical; {judged}"
    ]
    for item in verdict["differences"]:
        how = " (teacher-forced)" if item["forced"] else ""
        lines.append(
            f"  request {item['request_id']}, token {item['position']}{how}: {item['got']} instead "
            f"of {item['expected']}, margin {item['margin']:.1e}"
        )
    return lines


def summary(result: dict[str, Any]) -> list[str]:
    """Returns the lines that conclude a run."""
    memory, engine = result["memory"], result["engine"]
    own, *others = memory["replay"]
    big, static = others[0], others[-1]
    where = f"pages of {page_name(own['page_size'])} in {own['num_tensors']} tensors"
    rows = [
        ("KV memory at the peak", "MiB", "x ours"),
        (f"ours: {where}", _mib(own["mapped_bytes"]), "1.0"),
        ("  of which holding no token", _mib(own["wasted_bytes"]), ""),
    ]
    for layout in (big, static):
        ratio = layout["mapped_bytes"] / own["mapped_bytes"] if own["mapped_bytes"] else 0
        rows.append((layout["name"], _mib(layout["mapped_bytes"]), f"{ratio:.1f}"))
    total = engine["total_s"]
    share = result["mapping"]["critical_driver_s"] / total if total else 0
    return [
        *_head(result),
        "",
        *_align(rows),
        f"  waited for the driver during {share:.2%} of {total:.1f} s",
        "",
        "  KV memory over the steps, MiB: # rows of tokens, . mapped, but unused",
        *(f"  {line}" for line in chart(memory["steps"])),
        *_verify_lines(result),
    ]


def tables(result: dict[str, Any]) -> list[str]:
    """Formats all counters as tables."""
    lines = _head(result)
    return [*lines, "", *_memory_table(result), "", *_time_table(result), *_verify_lines(result)]


def _head(result: dict[str, Any]) -> list[str]:
    setting, engine = result["setting"], result["engine"]
    lines = [
        f"{setting['model']} in {setting['dtype']}, back end {setting['backend']}"
        + (f" on {setting['device_name']}" if setting["device_name"] else ""),
        f"{counted(len(result['requests']), 'request')}, "
        f"at most {engine['peak_running']} at a time: "
        f"{engine['prompt_tokens']} prompt tokens, {engine['new_tokens']} new tokens, "
        f"{result['tokens_per_s']:.1f} new tokens/s",
    ]
    if engine["preemptions"]:
        lines.append(
            f"{counted(engine['preemptions'], 'preemption')} for lack of memory, "
            f"{engine['recomputed_tokens']} tokens recomputed"
        )
    return lines
