# SPDX-License-Identifier: MIT
# The extension module that cffi generates: its types live in C, so Python sees Any. Only the
# package _native and the benchmark's timing loops import it.
from typing import Any

ffi: Any
lib: Any
