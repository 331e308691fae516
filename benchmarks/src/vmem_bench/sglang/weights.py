# SPDX-License-Identifier: MIT
"""A plug-in of SGLang: random weights with which answers depend on keys and values.

SGLang's own dummy weights are so small, norms among them, that attention vanishes in rounding: an
answer would be the same with wrong keys and values.
"""

from __future__ import annotations

from typing import Any

__all__ = ["draw", "register"]

_DEVIATION = 0.04


def register() -> None:
    """The entry point ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(target, draw, HookType.REPLACE)


def draw(model: Any) -> None:
    """Draws all weights; every process draws the same."""
    import torch

    for number, (name, parameter) in enumerate(model.named_parameters()):
        data = parameter.data
        if not torch.is_floating_point(data):
            continue
        if data.dim() == 1:
            data.fill_(0.0 if name.endswith("bias") else 1.0)  # else a norm's
        else:
            generator = torch.Generator(device=data.device).manual_seed(number)
            data.normal_(0.0, _DEVIATION, generator=generator)
