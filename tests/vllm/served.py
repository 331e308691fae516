# SPDX-License-Identifier: MIT
"""Runs ``vllm serve``, whose own command requires a distribution named vllm."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import (
    ServeSubcommand,
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Serves until the process is terminated."""
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    ServeSubcommand.cmd(args)


if __name__ == "__main__":
    main()
