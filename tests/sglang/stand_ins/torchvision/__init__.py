# SPDX-License-Identifier: MIT
"""Replaces torchvision, whose published build needs CUDA; text models do not use it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _Members(type):
    """Metaclass whose classes have every possible member; each member's value is its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Part(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = _Members(name, (), {})
        else:
            found = _part(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


def _part(name: str) -> ModuleType:
    found = sys.modules.get(name)
    if found is None:
        found = sys.modules[name] = _Part(name)
        found.__spec__ = __spec__
    return found


for _name in (
    *("transforms", "transforms.v2", "transforms.functional", "transforms.v2.functional"),
    *("io", "ops", "models"),
):
    _part(f"{__name__}.{_name}")
transforms = sys.modules[f"{__name__}.transforms"]
io = sys.modules[f"{__name__}.io"]
