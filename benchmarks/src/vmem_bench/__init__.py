# SPDX-License-Identifier: MIT
"""The benchmarks of `vmem bench` besides `api`; benchmarks/README.md describes them."""
