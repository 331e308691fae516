# SPDX-License-Identifier: MIT
"""The installed version of transformers, and how to configure its continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pyvmem.hf.continuous import CHECKED

__all__ = ["HERE", "HOW", "OLD", "checked_versions"]

HERE = transformers.__version__
VERSION = ".".join(HERE.split(".")[:2])
OLD = VERSION == "5.17"
"""True for transformers 5.17, which requires equal layers, cannot fork requests, and calls a page a
block.
"""

HOW: dict[str, Any] = {"block_size" if OLD else "page_size": 16}
if "auto_switch_to_flash" in transformers.ContinuousBatchingConfig.__annotations__:  # since 5.19
    HOW["auto_switch_to_flash"] = False
"""Arguments of a `ContinuousBatchingConfig`: small blocks, and the model's own attention."""

checked_versions = pytest.mark.skipif(
    VERSION not in CHECKED,
    reason=f"continuous batching needs transformers {', '.join(CHECKED)}; {HERE} is installed",
)
