# SPDX-License-Identifier: MIT
"""Tests that the QUERY struct that `make load` packs has the compiler's layout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from module_query import HEADER, query_layout

PROGRAM = """\
// SPDX-License-Identifier: MIT
#include <stddef.h>
#include <stdio.h>
#include "uvm_vmem_ioctl.h"

int main(void) {{
  printf("%lu %zu\\n", (unsigned long)UVM_VMEM_QUERY, sizeof(struct uvm_vmem_query));
  {lines}
  return 0;
}}
"""
LINE = 'printf("%zu\\n", offsetof(struct uvm_vmem_query, {name}));'


def test_layout(tmp_path: Path) -> None:
    layout = query_layout(HEADER.read_text(encoding="utf-8"))
    assert layout.names[0] == "size"
    source = tmp_path / "layout.c"
    lines = "\n  ".join(LINE.format(name=name) for name in layout.names)
    source.write_text(PROGRAM.format(lines=lines), encoding="utf-8")
    program = tmp_path / "layout"
    subprocess.run(["gcc", f"-I{HEADER.parent}", "-o", program, source], check=True)
    said = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert [int(said[0]), int(said[1])] == [layout.request, layout.packing.size]
    # For consecutive fields without gaps, the offsets are the sums of the codes' sizes.
    codes = layout.packing.format[1:]
    offsets, offset, count = [], 0, ""
    for code in codes:
        if code.isdigit():
            count += code
            continue
        offsets.append(offset)
        offset += {"s": int(count or 1), "I": 4, "Q": 8}[code]
        count = ""
    assert [int(word) for word in said[2:]] == offsets


def test_a_header_without_it() -> None:
    with pytest.raises(ValueError, match="does not define UVM_VMEM_QUERY"):
        query_layout("struct other {\n};\n")
