# SPDX-License-Identifier: MIT
"""torch tensors on vmem pages, and their memory given back while the tensors live."""

from pyvmem.torch_pool.pool import (
    TorchPoolStats,
    VMemPool,
)

__all__ = ["TorchPoolStats", "VMemPool"]
