# SPDX-License-Identifier: MIT
"""An SGLang plug-in: random weights that make answers depend on keys and values.

SGLang's own dummy weights, including those of norms, are so small that attention is lost in
rounding, so that wrong keys and values would not change an answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["draw", "register"]

_DEVIATION = 0.04


def register() -> None:
    """Replaces SGLang's dummy weights; the entry point in ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(target, draw, HookType.REPLACE)


def draw(model: Any) -> None:
    """Draws all weights of a model, with the same result in every process."""
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
