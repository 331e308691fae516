# SPDX-License-Identifier: MIT
"""``python -m pyvmem.hf.serve``: ``transformers serve --continuous-batching`` on virtual memory.

    python -m pyvmem.hf.serve --vmem-max-batch 64 HuggingFaceTB/SmolLM2-135M --port 8000

Options that begin with ``--vmem-`` are of `pyvmem.hf.continuous.install`; everything else goes to
transformers' own command as it is. Needs what that needs: ``pip install pyvmem[server]``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from pyvmem.errors import VMemError

__all__ = ["main", "split"]

_CB = "--continuous-batching"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyvmem.hf.serve",
        description="transformers' server with requests that are contiguous in virtual memory.",
        epilog="Other arguments are those of `transformers serve`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--vmem-max-batch", type=int, metavar="N", help="slots: requests that are worked on")
    add("--vmem-max-seq-len", type=int, metavar="TOKENS", help="tokens of a slot")
    add("--vmem-kernel", metavar="NAME", help="attention: auto, fa3, fa2, flex or sdpa")
    add("--vmem-backend", metavar="NAME", help="uvm, stock, cuda, host or auto")
    add("--vmem-page-size", type=int, metavar="BYTES", help="of a page; 0: the smallest")
    add("--vmem-group-size", type=int, metavar="LAYERS", help="layers that share a tensor")
    add("--vmem-memory-limit", type=int, metavar="BYTES", help="physical memory of the cache")
    add("--vmem-overread-rows", type=int, metavar="ROWS", help="191 for fa3, 127 for flex")
    return parser


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our options, under `install`'s names, and what is transformers'.

    ``--continuous-batching`` is added where it is missing. Exits with a message, as argparse does,
    for an option of ours with a bad value.
    """
    ours, theirs = _parser().parse_known_args(arguments)
    options = {
        name.removeprefix("vmem_"): value for name, value in vars(ours).items() if value is not None
    }
    if _CB not in theirs:
        theirs.append(_CB)
    return options, theirs


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs the plug for all models, then runs ``transformers serve``; its exit status.

    2 with a message: transformers' version was not checked, or a bad option.
    """
    options, theirs = split(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("pyvmem").setLevel(logging.INFO)
    try:
        from pyvmem.hf import continuous

        continuous.install(**options)
        from transformers.cli.transformers import app
    except (VMemError, ImportError) as error:
        print(f"pyvmem.hf.serve: {error}", file=sys.stderr)
        return 2
    app(["serve", *theirs], standalone_mode=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
