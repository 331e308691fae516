# SPDX-License-Identifier: MIT
"""The parts of the build that pyproject.toml cannot express: version, extension, ABI tag, links.

VMEM_URL is the address of the repository; only builds that are published need it.
"""

import os
import re
import runpy
import sysconfig
from pathlib import Path

from setuptools import setup

build = runpy.run_path("pyvmem/_build.py")
# cffi limits the extension to Python's stable ABI, so that one wheel serves Python 3.10 and later.
# Free-threaded builds have no stable ABI.
abi = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}

version = build["library_version"]()
url = os.environ.get("VMEM_URL", "").rstrip("/")
readme = Path("README.md").read_text(encoding="utf-8")
if url:  # a package index shows only this page, so its links must point to the tag
    readme = re.sub(r"\]\((?!\w+:|#)", f"]({url}/blob/v{version}/", readme)
    readme = re.sub(r"(!\[[^\]]*\]\(.*?)/blob/", r"\1/raw/", readme)
urls = {
    "Source": url,
    "Documentation": f"{url}/blob/v{version}/docs/index.md",
    "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
    "Issues": f"{url}/issues",
}

setup(
    version=version,
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls=urls if url else {},
    cffi_modules=["pyvmem/_build.py:ffibuilder"],
    options={"bdist_wheel": abi},
)
