#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the documentation site in build/site; `--serve` shows a live preview.

MkDocs runs in its own environment, build/docs-venv, which contains the packages that importing
pyvmem requires, but not torch. Warnings are errors. The built site is checked as well: every link
and anchor must resolve, and nothing may be loaded from another host.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import urllib.parse
import venv
from html.parser import HTMLParser
from pathlib import Path

from environment import read_pins
from kernel_common import ROOT
from system_packages import install, missing

ENVIRONMENT = ROOT / "build" / "docs-venv"
SITE = ROOT / "build" / "site"
FOREIGN = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s;]+)""")
REQUIREMENTS = [ROOT / "scripts" / "requirements" / f"{name}.txt" for name in ("build", "docs")]
MISSING = 3  # exit status if the tools cannot be installed on this machine


def tools() -> bool:
    """Creates or updates the environment; returns False if this machine cannot."""
    stamp = ENVIRONMENT / "requirements"
    wanted = "".join(path.read_text(encoding="utf-8") for path in REQUIREMENTS)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        if parts := missing():
            install(parts)
        venv.create(ENVIRONMENT, clear=True, symlinks=True, with_pip=True)
        pins = {**read_pins("build"), **read_pins("docs")}
        words = ["-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
        if not python(*words, *(f"{name}=={version}" for name, version in pins.items())):
            return False
        stamp.write_text(wanted, encoding="utf-8")
    # The command-line reference imports pyvmem, which `make setup` has usually built already.
    return any((ROOT / "pyvmem").glob("_vmem*.so")) or python("setup.py", "-q", "build_ext", "-i")


def python(*words: str) -> bool:
    """Runs the environment's Python with these arguments; returns True if it succeeds."""
    command = [str(ENVIRONMENT / "bin" / "python"), *words]
    return not subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode


def mkdocs(*words: str) -> int:
    """Runs MkDocs with our hooks on its path; shows warnings and errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "NO_MKDOCS_2_WARNING": "1"}
    command = [str(ENVIRONMENT / "bin/python"), "-m", "mkdocs", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if words[0] == "serve" or not line.startswith("INFO"):
                print(line, end="", flush=True)
    return process.returncode


class References(HTMLParser):
    """Collects a page's links, loaded resources and anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects an element's links, resources and anchors."""
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])


def read_site() -> dict[Path, References]:
    """Reads all pages of the site."""
    pages = {}
    for path in sorted(SITE.rglob("*.html")):
        pages[path] = References()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def problem_of(page: Path, link: str, pages: dict[Path, References]) -> str | None:
    """Checks a link inside the site and returns the problem, or None."""
    parts = urllib.parse.urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = urllib.parse.unquote(parts.path)
    if path.startswith("/"):  # only the page for unknown addresses (404) may use absolute links
        root = urllib.parse.urlsplit(os.environ.get("SITE_URL", "")).path or "/"
        if not path.startswith(root):
            return f"no page {link}"
        path = "/" + path.removeprefix(root)
    base = SITE if path.startswith("/") else page.parent
    target = (base / path.lstrip("/")).resolve() if path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return f"no page {link}"
    names = pages[target].names if target in pages else set()
    anchor = urllib.parse.unquote(parts.fragment)
    if anchor and target in pages and anchor not in names:
        return f"no part {link}"
    return None


def check_site() -> list[str]:
    """Reports broken links, and resources loaded from other hosts."""
    pages = read_site()
    problems = []
    for page, found in pages.items():
        where = page.relative_to(SITE)
        for link in [*found.links, *found.loaded]:
            problem = problem_of(page, link, pages)
            if problem:
                problems.append(f"{where}: {problem}")
        for link in found.loaded:
            if urllib.parse.urlsplit(link).netloc:
                problems.append(f"{where}: loads {link} from another host")
    for sheet in sorted(SITE.rglob("*.css")):
        for link in FOREIGN.findall(sheet.read_text(encoding="utf-8")):
            problems.append(f"{sheet.relative_to(SITE)}: loads {link} from another host")
    print(f"{len(pages)} pages, {sum(len(one.links) for one in pages.values())} links")
    return problems


def main() -> int:
    """Builds and checks the site, or serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--serve", action="store_true", help="show a live preview on http://localhost:8000"
    )
    options = parser.parse_args()
    if not tools():
        print("scripts/requirements/docs.txt could not be installed")
        return MISSING
    if options.serve:
        return mkdocs("serve")
    if mkdocs("build", "--strict", "--site-dir", str(SITE)):
        return 1
    problems = check_site()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"built {SITE.relative_to(ROOT)}/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
