# SPDX-License-Identifier: MIT
"""`vmem bench sglang`: `pyvmem.sglang`'s pool compared with stock SGLang, one engine at a time."""
