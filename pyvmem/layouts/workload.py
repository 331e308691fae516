# SPDX-License-Identifier: MIT
"""Reads the lengths of requests from public traces, or generates them from a seed.

The formats are recognized by their columns:

    Azure LLM inference (CSV)    TIMESTAMP,ContextTokens,GeneratedTokens
    vAttention's artifact (CSV)  num_prefill_tokens,num_decode_tokens,...
    Mooncake (JSONL)             {"input_length": ..., "output_length": ..., ...}
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from pyvmem.plumbing.validation import invalid

__all__ = ["Arrival", "Request", "generate", "poisson", "read_arrivals", "read_trace"]

_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_length", "output_length"),
)


class Request(NamedTuple):
    """The lengths of a request.

    Attributes:
        context: number of tokens in the prompt.
        output: number of tokens to generate.
    """

    context: int
    output: int

    @property
    def longest(self) -> int:
        """Number of tokens with keys and values in the last iteration: all but the last token."""
        return self.context + self.output - 1


class Arrival(NamedTuple):
    """A request and its arrival time.

    Attributes:
        at: seconds after the first request.
        content: one id per 512 tokens of the prompt; prompts with a common prefix begin with the
            same ids. Empty if the prompt shares no prefix.
    """

    at: float
    request: Request
    content: tuple[int, ...] = ()


def read_trace(path: Path | str) -> list[Request]:
    """Reads a trace's requests in order; skips requests without a prompt or an output.

    Raises:
        InvalidArgument: the file cannot be read, is in another format, or contains no requests.
    """
    return [request for request, _ in _read(Path(path))]


def read_arrivals(path: Path | str) -> list[Arrival]:
    """Reads a trace with arrival times and contents; without times, all requests arrive at 0.

    Raises:
        InvalidArgument: as for `read_trace`.
    """
    found = _read(Path(path))
    try:
        times = [_time(row) for _, row in found]
        contents = [tuple(row.get("hash_ids") or ()) for _, row in found]
    except (ValueError, TypeError) as error:
        raise invalid(f"{path}: {error}", op="vmem layouts") from None
    first = min(times)
    return sorted(
        (
            Arrival(at - first, request, content)
            for at, (request, _), content in zip(times, found, contents, strict=True)
        ),
        key=lambda one: one.at,
    )


def _read(path: Path) -> list[tuple[Request, Mapping[str, Any]]]:
    """Returns each request that has a prompt and an output, with its row in the trace."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows: Iterable[Mapping[str, Any]]
            if path.suffix == ".jsonl":
                rows = (json.loads(line) for line in lines)
            else:
                rows = csv.DictReader(lines)
            requests = [(_request(number, row), row) for number, row in enumerate(rows, 1)]
    # open() raises OSError; csv raises csv.Error; json and float raise the others.
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise invalid(f"{path}: {why}", op="vmem layouts") from None
    found = [one for one in requests if min(one[0]) > 0]
    if not found:
        raise invalid(f"{path}: no request", op="vmem layouts")
    return found


def _time(row: Mapping[str, Any]) -> float:
    """Returns a row's arrival time, in seconds from an arbitrary origin."""
    if row.get("timestamp") is not None:
        return float(row["timestamp"]) / 1e3
    if row.get("TIMESTAMP"):
        moment, _, fraction = row["TIMESTAMP"].partition(".")
        return datetime.fromisoformat(moment + "+00:00").timestamp() + float(f"0.{fraction or 0}")
    return 0.0


def poisson(requests: Iterable[Request], rate: float, seed: int) -> list[Arrival]:
    """Assigns arrival times, in order, drawn from a Poisson process of `rate` requests per second.

    Raises:
        InvalidArgument: the rate is not positive.
    """
    if not rate > 0:
        raise invalid(f"rate is {rate}; it must be positive", op="vmem layouts")
    rng = random.Random(seed)
    at, out = 0.0, []
    for request in requests:
        out.append(Arrival(at, request))
        at += rng.expovariate(rate)
    return out


def _request(number: int, row: Mapping[str, Any]) -> Request:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number} is not a JSON object")
    for context, output in _COLUMNS:
        if row.get(context) is not None and row.get(output) is not None:
            return Request(int(float(row[context])), int(float(row[output])))
    wanted = " or ".join(map(", ".join, _COLUMNS))
    raise ValueError(f"row {number} lacks the columns {wanted}")


def generate(count: int, seed: int) -> list[Request]:
    """Generates requests with lengths similar to those in Azure's 2023 conversation trace.

    The lengths are log-normal, with the trace's medians (1,020 and 129 tokens), and are capped at
    its maximum lengths (14,050 and 1,000). The same seed always produces the same requests.

    Raises:
        InvalidArgument: `count` is not positive.
    """
    if count < 1:
        raise invalid(f"count is {count}; it must be at least 1", op="vmem layouts")
    rng = random.Random(seed)

    def length(median: float, spread: float, longest: int) -> int:
        return max(1, min(longest, round(median * math.exp(rng.gauss(0.0, spread)))))

    return [Request(length(1020, 0.8, 14050), length(129, 0.8, 1000)) for _ in range(count)]
