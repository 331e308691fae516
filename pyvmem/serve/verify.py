# SPDX-License-Identifier: MIT
"""Checks answers against transformers' ``generate`` with its `DynamicCache`, one request at a time.

The rule: an answer is compared up to its first difference. A difference is accepted only at a near
tie in the reference (its two best logits differ by less than `TIE` of the larger), and in at most
one in 32 requests; the request is then served again under teacher forcing with the reference's
tokens, and at every other position the engine's own choice must match the reference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyvmem.kvcache import KVCache
from pyvmem.serve.engine import Engine
from pyvmem.serve.job import Completion, Job
from pyvmem.serve.model import LoadedModel, cache_dir

__all__ = ["TIE", "Difference", "Reference", "Verdict", "compare", "first_difference", "references"]

TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """The reference answer, from ``generate``.

    Attributes:
        tokens: the answer's token ids.
        margins: for each token, the gap between the two best logits, as a fraction of the larger.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """A position where the engine's token differs from the reference's; None means no token."""

    request_id: int
    position: int
    expected: int | None
    got: int | None
    margin: float
    forced: bool


@dataclass(frozen=True)
class Verdict:
    """The outcome of `compare`.

    Attributes:
        requests, identical: number of requests compared, and how many of them match in every token.
        allowed: maximum number of requests that may differ at a tie.
        differences: all differences found.
        passed: whether the rule at the top of this module holds.
    """

    requests: int
    identical: int
    allowed: int
    differences: tuple[Difference, ...]
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def _generate(loaded: LoadedModel, job: Job) -> Reference:
    import torch
    from transformers import DynamicCache

    from pyvmem.hf.keyword import CACHE

    model = loaded.model
    ids = torch.tensor([job.prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=job.max_new_tokens,
        do_sample=False,
        **{CACHE: DynamicCache(config=model.config)},
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = tuple(output.sequences[0, ids.shape[1] :].tolist())
    margins = []
    for logits in output.logits:
        best, second = logits[0].float().topk(2).values.tolist()
        margins.append((best - second) / max(abs(best), abs(second), 1e-30))
    return Reference(tokens, tuple(margins))


def _key(loaded: LoadedModel, job: Job) -> str | None:
    """Hashes everything that a reference depends on; returns None for an unidentifiable model."""
    import torch
    import transformers

    if loaded.folder.parent != cache_dir() / "models":
        return None
    parts = [
        transformers.__version__,
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        str(loaded.model.device.type),
        str(loaded.model.dtype),
        loaded.folder.name,
        job.max_new_tokens,
        sorted(job.eos_token_ids),
        job.prompt,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def references(
    loaded: LoadedModel, jobs: Sequence[Job], progress: Callable[[int], None] | None = None
) -> list[Reference]:
    """Returns the jobs' references, which are cached on disk by a hash of all their inputs.

    Args:
        loaded: the model, with transformers' own attention, not an engine's.
        progress: called with the number of jobs done so far.

    Raises:
        ValueError: an engine is open on the model.
    """
    if loaded.model.config._attn_implementation == "vmem":
        raise ValueError("the model is in use by an engine; close the engine first")
    folder = cache_dir() / "references"
    found = []
    for done, job in enumerate(jobs, 1):
        key = _key(loaded, job)
        path = folder / f"{key}.json" if key else None
        found.append(_load(path) or _store(path, _generate(loaded, job)))
        if progress is not None:
            progress(done)
    return found


def _load(path: Path | None) -> Reference | None:
    if path is None or not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Reference(tuple(data["tokens"]), tuple(data["margins"]))


def _store(path: Path | None, reference: Reference) -> Reference:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(reference)), encoding="utf-8")
        scratch.replace(path)
    return reference


def first_difference(
    request_id: int,
    got: Sequence[int],
    reference: Reference,
    skip: int = -1,
    *,
    forced: bool = False,
) -> Difference | None:
    """Returns the first position, other than `skip`, where an answer differs from the reference."""
    for position in range(max(len(got), len(reference.tokens))):
        expected = reference.tokens[position] if position < len(reference.tokens) else None
        token = got[position] if position < len(got) else None
        if expected != token and position != skip:
            margin = reference.margins[position] if expected is not None else float("inf")
            return Difference(request_id, position, expected, token, margin, forced)
    return None


def compare(
    loaded: LoadedModel,
    cache: KVCache,
    completions: Iterable[Completion],
    expected: dict[int, Reference],
) -> Verdict:
    """Applies the module's rule to an engine's answers; serves differing requests again.

    Args:
        cache: the cache used to serve differing requests again.
        expected: references by request id.
    """
    found: list[Difference] = []
    again: list[tuple[Job, Difference]] = []
    count = 0
    for completion in completions:
        count += 1
        job = completion.job
        reference = expected[job.request_id]
        difference = first_difference(job.request_id, completion.predictions, reference)
        if difference is not None:
            found.append(difference)
            forced = replace(
                job,
                forced=reference.tokens,
                max_new_tokens=len(reference.tokens),
                eos_token_ids=frozenset(),
            )
            again.append((forced, difference))
    ties = all(difference.margin < TIE for difference in found)
    rest: list[Difference] = []
    if again:
        skip = {job.request_id: difference.position for job, difference in again}
        with Engine(loaded.model, cache) as engine:
            for event in engine.run(job for job, _ in again):
                if event.completion is not None:
                    name = event.request_id
                    later = first_difference(
                        name, event.completion.predictions, expected[name], skip[name], forced=True
                    )
                    if later is not None:
                        rest.append(later)
    allowed = count // 32
    return Verdict(
        count,
        count - len(found),
        allowed,
        (*found, *rest),
        ties and len(found) <= allowed and not rest,
    )
