# SPDX-License-Identifier: MIT
"""Virtual machines that the kernel tests run in."""
