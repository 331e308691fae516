# SPDX-License-Identifier: MIT
"""`vmem bench sglang`: SGLang on the pool of `pyvmem.sglang`, compared with stock SGLang."""
