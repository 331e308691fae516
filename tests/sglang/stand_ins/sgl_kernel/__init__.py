# SPDX-License-Identifier: MIT
"""Replaces SGLang's kernels, which exist only for GPUs; each replacement raises when called.

SGLang's CPU engine imports the kernels by name, but runs a Llama without them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0"


class _Names:
    """Stands in for `scalar_types`: has every attribute, and an attribute's value is its name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _stand_in(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "scalar_types":
        return _Names()

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} was called, but is a stand-in")

    return kernel


def __getattr__(name: str) -> Any:
    return _stand_in(__name__, name)


class _Part(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        return _stand_in(self.__name__, name)


class _Finder:
    """Finds any submodule of this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())  # type: ignore[arg-type]
