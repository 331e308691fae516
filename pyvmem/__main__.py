# SPDX-License-Identifier: MIT
"""``python -m pyvmem`` is ``vmem``."""

import sys

from pyvmem.commands.cli import main

sys.exit(main())
