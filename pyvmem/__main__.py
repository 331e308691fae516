# SPDX-License-Identifier: MIT
"""Runs the ``vmem`` command as ``python -m pyvmem``."""

import sys

from pyvmem.commands.cli import main

sys.exit(main())
