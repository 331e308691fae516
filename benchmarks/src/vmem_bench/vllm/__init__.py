# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: the pool of `pyvmem.vllm` beside stock vLLM, a part a module."""
