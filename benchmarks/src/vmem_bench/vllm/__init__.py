# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: `pyvmem.vllm`'s pool compared with stock vLLM; a module per part."""
