# SPDX-License-Identifier: MIT
"""What the cache can do, and what of it needs which back end: a table by which it refuses."""

from pyvmem.features.feature import BackEnd, Feature, require_page_size
from pyvmem.features.record import Probed, about
from pyvmem.features.table import FEATURES

__all__ = ["FEATURES", "BackEnd", "Feature", "Probed", "about", "require_page_size"]
