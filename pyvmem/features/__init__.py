# SPDX-License-Identifier: MIT
"""The cache's features, and the capabilities that each requires of a back end."""

from pyvmem.features.feature import BackEnd, Feature, require_page_size
from pyvmem.features.record import Probed, about
from pyvmem.features.table import FEATURES

__all__ = ["FEATURES", "BackEnd", "Feature", "Probed", "about", "require_page_size"]
