# SPDX-License-Identifier: MIT
"""A plug-in for vLLM and SGLang: random weights that make answers depend on keys and values.

The dummy weights of both engines, including those of norms, are so small that attention is lost in
rounding. With them, an engine that loses half of its keys and values would give the same answers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["draw", "register_sglang", "register_vllm"]

_DEVIATION = 0.04


def register_sglang() -> None:
    """Replaces SGLang's dummy weights; an entry point in ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(target, draw, HookType.REPLACE)


def register_vllm() -> None:
    """Replaces vLLM's dummy weights; an entry point in ``vllm.general_plugins``."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda _, model, model_config: draw(model)


def draw(model: Any) -> None:
    """Randomly initializes all of a model's weights, identically in every process."""
    import torch

    for number, (name, parameter) in enumerate(model.named_parameters()):
        data = parameter.data
        if not torch.is_floating_point(data):
            continue
        if data.dim() == 1:
            data.fill_(0.0 if name.endswith("bias") else 1.0)  # 1 for a norm's weights
        else:
            generator = torch.Generator(device=data.device).manual_seed(number)
            data.normal_(0.0, _DEVIATION, generator=generator)
