# SPDX-License-Identifier: MIT
"""torch tensors on vmem pages, whose memory can be released while the tensors are alive."""

from pyvmem.torch_pool.pool import (
    TorchPoolStats,
    VMemPool,
)

__all__ = ["TorchPoolStats", "VMemPool"]
