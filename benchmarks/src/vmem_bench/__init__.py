# SPDX-License-Identifier: MIT
"""The benchmarks of `vmem bench` other than `api`; benchmarks/README.md describes them."""
