# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: vLLM on the pool of `pyvmem.vllm`, compared with stock vLLM."""
