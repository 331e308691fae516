# SPDX-License-Identifier: MIT
# The extension module that cffi generates: its types live in C, so Python sees Any. Only _native.py
# and the struct writers beside it may import it.
from typing import Any

ffi: Any
lib: Any
