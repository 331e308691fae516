# SPDX-License-Identifier: MIT
"""The part of the build that pyproject.toml cannot say: version, extension module, ABI tag."""

import runpy
import sysconfig

from setuptools import setup

build = runpy.run_path("pyvmem/_build.py")
# The extension keeps to Python's stable ABI (cffi sees to that), so that one wheel serves 3.10 and
# later; free-threaded builds have no such ABI.
abi = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}

setup(
    version=build["library_version"](),
    cffi_modules=["pyvmem/_build.py:ffibuilder"],
    options={"bdist_wheel": abi},
)
