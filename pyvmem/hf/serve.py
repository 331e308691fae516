# SPDX-License-Identifier: MIT
"""``python -m pyvmem.hf.serve``: ``transformers serve --continuous-batching`` on virtual memory.

    python -m pyvmem.hf.serve --vmem-max-batch 64 HuggingFaceTB/SmolLM2-135M --port 8000

Options that begin with ``--vmem-`` are arguments of `pyvmem.hf.continuous.install`; all other
arguments are passed unchanged to transformers' own command. Both need the same packages:
``pip install '.[server]'`` in a clone of the repository.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from pyvmem.errors import InvalidArgument, VMemError

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
    add(
        "--vmem-max-batch",
        type=int,
        metavar="N",
        help="number of slots, which limits running requests",
    )
    add("--vmem-max-seq-len", type=int, metavar="TOKENS", help="tokens of a slot")
    add("--vmem-kernel", metavar="NAME", help="attention: auto, fa3, fa2, flex or sdpa")
    add("--vmem-backend", metavar="NAME", help="uvm, stock, cuda, host or auto")
    add("--vmem-page-size", type=int, metavar="BYTES", help="page size; 0: the smallest")
    add("--vmem-group-size", type=int, metavar="LAYERS", help="layers that share a tensor")
    add("--vmem-memory-limit", type=int, metavar="BYTES", help="physical memory of the cache")
    add("--vmem-overread-rows", type=int, metavar="ROWS", help="191 for fa3, 127 for flex")
    more = "keep these rows in decoding, too; needed if fa3 or flex is named"
    add("--vmem-overread-decode", action="store_const", const=True, help=more)
    return parser


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Separates the ``--vmem-`` options, under `install`'s names, from transformers' arguments.

    Adds ``--continuous-batching`` if missing. Exits with a message, like argparse, if a ``--vmem-``
    option has a bad value.
    """
    ours, theirs = _parser().parse_known_args(arguments)
    options = {
        name.removeprefix("vmem_"): value for name, value in vars(ours).items() if value is not None
    }
    if _CB not in theirs:
        theirs.append(_CB)
    return options, theirs


def _refuse_with_400(server: Any) -> None:
    """Makes the server tell the client why a request was rejected.

    transformers treats every error from a manager as an internal error and would respond with
    status 500 and no message. Does nothing if the module has no ``build_server``.
    """
    build = getattr(server, "build_server", None)
    if build is None:
        return

    def build_server(*args: Any, **kwargs: Any) -> Any:
        from fastapi.responses import JSONResponse

        def answer(_request: Any, error: Exception) -> Any:
            reason = {"message": str(error), "type": "invalid_request_error"}
            return JSONResponse({"error": reason}, status_code=400)

        app = build(*args, **kwargs)
        app.add_exception_handler(InvalidArgument, answer)
        return app

    server.build_server = build_server


def _named(app: Any, theirs: Sequence[str]) -> bool:
    """Returns true if the parser of ``transformers serve`` finds a model in the arguments.

    Without a model argument, the server would load, and map memory for, any model that a request
    names.
    """
    if "--help" in theirs:
        return True
    if not hasattr(app, "commands"):  # in some versions, `app` is a typer.Typer, not a group
        from typer.main import get_command

        app = get_command(app)
    command = app.commands["serve"]
    try:
        found = command.make_context("serve", list(theirs)).params
    except Exception:  # an error from click or from typer's copy of it; `serve` itself reports it
        return True
    return bool(found.get("force_model", True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs the plug-in for all models and runs ``transformers serve``; returns its exit status.

    Returns 2, after printing a message, if the version of transformers is unsupported, an option is
    bad, a package is missing, or the model is missing or does not exist; 130 on Ctrl-C.
    """
    options, theirs = split(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("pyvmem").setLevel(logging.INFO)
    try:
        from pyvmem.hf import continuous

        continuous.install(**options)
        from transformers.cli.serving import server
        from transformers.cli.transformers import app

        if not _named(app, theirs):
            text = "no MODEL: pass the folder or the repository of the model to serve"
            print(f"pyvmem.hf.serve: {text}", file=sys.stderr)
            return 2
        _refuse_with_400(server)
        try:
            app(["serve", *theirs], standalone_mode=False)
        except RuntimeError as error:  # includes Abort from click or from typer's copy of it
            if type(error).__name__ != "Abort":
                raise
            return 130
    except (VMemError, ImportError, OSError) as error:  # OSError: the model does not exist
        print(f"pyvmem.hf.serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
