# SPDX-License-Identifier: MIT
"""The part of the build that pyproject.toml cannot say: version, extension module, ABI tag, links.

VMEM_URL is where the repository that publishes is to be found; a build for oneself needs none.
"""

import os
import re
import runpy
import sysconfig
from pathlib import Path

from setuptools import setup

build = runpy.run_path("pyvmem/_build.py")
# The extension keeps to Python's stable ABI (cffi sees to that), so that one wheel serves 3.10 and
# later; free-threaded builds have no such ABI.
abi = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}

version = build["library_version"]()
url = os.environ.get("VMEM_URL", "").rstrip("/")
readme = Path("README.md").read_text(encoding="utf-8")
if url:  # an index shows the page alone: its links lead to the tag
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
