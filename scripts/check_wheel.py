# SPDX-License-Identifier: MIT
"""Maps, writes and reads a page with an installed pyvmem, and prints one line.

Run it outside the source tree, with the Python of the environment to check.
"""

import sys

import pyvmem

SIZE = 64 << 10

with pyvmem.Context("host") as context:
    space = context.reserve(16 * SIZE)
    pages = context.create(SIZE)
    context.map(space.addr, SIZE, pages)
    context.write(space.addr, b"page")
    if context.read(space.addr, 5) != b"page\0":
        sys.exit("the page does not contain the written data")
    pages.release()
    space.close()
    if context.stats().mapped_bytes:
        sys.exit("something is still mapped")
print(f"pyvmem {pyvmem.__version__} works")
