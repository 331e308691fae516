# SPDX-License-Identifier: MIT
"""Adds the collectives of expert parallelism, which vLLM's CPU code lacks.

This is a worker extension (``--worker-extension-cls``), which vLLM imports in each worker before it
creates its process groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

__all__ = ["Nothing"]


class Nothing:
    """The extension class, which adds nothing to the worker."""


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    own = input_.new_zeros((max(sizes), *input_.shape[1:]))
    own[: len(input_)] = input_
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=self.device_group)
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    assert dim == 0
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    parts = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(parts)[self.rank_in_group]


def _own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Wraps a rank's kernel to use local expert ids and a weight of 0 for other ranks' experts."""

    @functools.wraps(apply)
    def applied(*args: Any, **kwargs: Any) -> None:
        own = kwargs["expert_map"]
        if own is not None:
            place = own[kwargs["topk_ids"].long()]
            weights = kwargs["topk_weights"]
            kwargs["topk_weights"] = weights.masked_fill(place < 0, 0)
            kwargs["topk_ids"] = place.clamp(min=0).to(kwargs["topk_ids"].dtype)
        apply(*args, **kwargs)

    return applied


CPUUnquantizedExperts.apply = _own_experts(CPUUnquantizedExperts.apply)
CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
