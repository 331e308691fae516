# SPDX-License-Identifier: MIT
"""Reads rows that have no pages, in a notebook kernel and in a debugger that displays variables.

Needs the extra ``notebook``, whose kernel includes the debugger.
"""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra 'notebook' is not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("debugpy")
pytest.importorskip("torch")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CELLS = [
    "import os, torch\nfrom pyvmem import KVCache, KVCacheConfig\n"
    "cache = KVCache(KVCacheConfig(2, 2, 64, 'float32', 4, 4096), backend='host')\n"
    "slot = cache.alloc_reqid()\n"
    "assert cache.step([100 if each == slot else 0 for each in range(4)]) == 0\n"
    "rows = cache.k(0)\nrows[slot, :100] = 1\nprint(os.getpid())",
    "print(rows)",
    "rows",
    "rows.clone()",
    "rows.isnan()",
    "import copy\ncopy.deepcopy(rows)",
    "import pickle\npickle.dumps(rows)",
    "import io\ntorch.save(rows, io.BytesIO())",
    "import debugpy._vendored.force_pydevd\n"
    "from _pydevd_bundle.pydevd_safe_repr import SafeRepr\n"
    "print(SafeRepr()(rows))",
    "print(int(rows[slot, :100].sum()), os.getpid())",
]


def test_the_kernel_survives() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=200, allow_errors=True)
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells]
    pid = outputs[0][0].text.strip()
    for cell in outputs[1:-2]:
        assert any("NotMapped" in str(one) and "element [" in str(one) for one in cell), cell
    assert "torch.Tensor object at" in outputs[-2][0].text  # shown by the debugger if repr raises
    assert outputs[-1][0].text.split() == [str(100 * 2 * 64), pid]
