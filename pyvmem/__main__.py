# SPDX-License-Identifier: MIT
"""``python -m pyvmem`` is ``vmem``."""

import sys

from pyvmem.cli import main

sys.exit(main())
