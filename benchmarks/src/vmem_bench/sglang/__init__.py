# SPDX-License-Identifier: MIT
"""`vmem bench sglang`: the pool of `pyvmem.sglang` beside stock SGLang, an engine at a time."""
