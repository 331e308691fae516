# SPDX-License-Identifier: MIT
"""Checks the man pages: one per public function, consistent with vmem.h, well-formed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from vmem_header import HEADER, ROOT, functions, normal

__all__ = ["CHECKS"]

MAN = ROOT / "libvmem" / "man"
SECTIONS_3 = ["NAME", "LIBRARY", "SYNOPSIS", "DESCRIPTION", "RETURN VALUES", "SEE ALSO"]


def page_of(name: str) -> Path | None:
    """Returns the source of a function's page (following a `.so` link), or None if it has none."""
    path = MAN / f"{name}.3"
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    link = re.search(r"^\.so man3/(\S+)$", text, re.M)
    return MAN / link[1] if link else path


def synopsis(text: str) -> dict[str, str]:
    """Returns the declarations in the SYNOPSIS of an mdoc page, by function name."""
    part = text.split(".Sh SYNOPSIS", 1)[-1].split(".Sh DESCRIPTION", 1)[0]
    found = {}
    result = ""
    pattern = (
        r"^\.Ft (?P<ft>.*)$|^\.Fn (?P<fn>\w+)(?P<args>.*)$"
        r"|^\.Fo (?P<fo>\w+)\n(?P<fa>(?:\.Fa .*\n)+)\.Fc"
    )
    for match in re.finditer(pattern, part, re.M):
        if match["ft"]:
            result = match["ft"].strip('"')
        name = match["fn"] or match["fo"]
        if name:
            arguments = re.findall(r'"([^"]*)"', match["args"] or match["fa"] or "")
            found[name] = normal(f"{result} {name}({', '.join(arguments)})")
    return found


def check_pages_exist() -> list[str]:
    """Checks that functions and structures have pages in section 3, and vmem(7) and vmem(1) exist.

    A function named as in the papers has a second page under the usual spelling, such as vmem_map
    for vMemMap.
    """
    spelled = [re.sub("^vMem", "vmem_", name).lower() for name in functions() if name[1] == "M"]
    names = [*functions(), *structures(), *spelled]
    problems = [f"no man page for {name}" for name in names if page_of(name) is None]
    problems += [f"no {name}" for name in ("vmem.7", "vmem.1") if not (MAN / name).exists()]
    extra = sorted(p.name for p in MAN.glob("*.3") if p.name[:-2] not in names)
    return problems + [f"{name}: vmem.h has no such function or structure" for name in extra]


def structures() -> list[str]:
    """Returns the structures of vmem.h."""
    return re.findall(r"^struct (vmem_\w+) \{", HEADER.read_text(encoding="utf-8"), re.M)


def check_prototypes() -> list[str]:
    """Checks that the declaration in each SYNOPSIS matches vmem.h."""
    problems = []
    for name, declaration in functions().items():
        page = page_of(name)
        if page is None:
            continue
        shown = synopsis(page.read_text(encoding="utf-8")).get(name)
        if shown != declaration:
            problems.append(f"{page.name} declares\n  {shown}\nvmem.h\n  {declaration}")
    return problems


def check_sections() -> list[str]:
    """Checks that each page of section 3 has the required sections, in order."""
    problems = []
    for page in sorted({p for name in functions() if (p := page_of(name))}):
        titles = re.findall(r"^\.Sh (.*)$", page.read_text(encoding="utf-8"), re.M)
        wanted = [title for title in titles if title in SECTIONS_3]
        if wanted != SECTIONS_3:
            problems.append(f"{page.name}: the sections are {', '.join(titles)}")
    return problems


def check_names_used() -> list[str]:
    """Checks that all vmem names in a page exist: functions, constants, structures, pages."""
    header = HEADER.read_text(encoding="utf-8")
    known = set(re.findall(r"\b(?:vmem_\w+|vMem\w+|VMEM_\w+)\b", header))
    problems = []
    for page in sorted(MAN.iterdir()):
        text = re.sub(r"^\.Dt .*$", "", page.read_text(encoding="utf-8"), flags=re.M)
        for name in sorted(set(re.findall(r"\b(?:vmem_\w+|vMem[A-Z]\w+|VMEM_\w+)", text)) - known):
            if name not in ENVIRONMENT:
                problems.append(f"{page.name}: {name} is not in vmem.h")
        for name, section in re.findall(r"^\.Xr (vmem\w*|vMem\w*) (\d)", text, re.M):
            if not (MAN / f"{name}.{section}").exists():
                problems.append(f"{page.name}: {name}({section}) does not exist")
    return problems


def check_fields() -> list[str]:
    """Checks that section 3 documents each constant and each structure's fields from vmem.h."""
    header = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
    text = " ".join(page.read_text(encoding="utf-8") for page in MAN.glob("*.3"))
    words = set(re.findall(r"\w+", text))
    wanted: dict[str, str] = {}
    for struct in re.finditer(r"^struct (\w+) \{(.*?)^\};", header, re.M | re.S):
        for line in struct[2].split(";"):
            declarators = re.sub(r"\[[^]]*\]", "", line).split(",")
            wanted |= {d.split()[-1].lstrip("*"): struct[1] for d in declarators if d.split()}
    for enum in re.finditer(r"^enum (\w+) \{(.*?)\};", header, re.M | re.S):
        wanted |= dict.fromkeys(re.findall(r"\b(VMEM_\w+)", enum[2]), enum[1])
    macros = re.findall(r"^#define (VMEM_\w+) ", header, re.M)
    wanted |= dict.fromkeys((m for m in macros if m != "VMEM_API"), "the macros")
    missing = sorted(name for name in wanted if name not in words)
    return [f"no page of section 3 has {name} of {wanted[name]}" for name in missing]


# Environment variables of the command line, which are not in vmem.h.
ENVIRONMENT = {"VMEM_CACHE_DIR"}

Linter = Callable[[Path], list[str]]


def lint_mandoc(page: Path) -> list[str]:
    """Returns mandoc's warnings."""
    command = ["mandoc", "-T", "lint", "-W", "warning", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def lint_groff(page: Path) -> list[str]:
    """Returns groff's warnings."""
    command = ["groff", "-man" if is_link(page) else "-mandoc", "-Tutf8", "-wall", "-z", "-I."]
    done = subprocess.run(
        [*command, str(page)], capture_output=True, text=True, check=False, cwd=MAN.parent
    )
    return done.stderr.splitlines()


def is_link(page: Path) -> bool:
    """True if the page is a `.so` link to another page."""
    return page.read_text(encoding="utf-8").startswith(".so ")


def check_format() -> list[str]:
    """Checks that the installed formatters accept the pages."""
    linters: dict[str, Linter] = {"mandoc": lint_mandoc, "groff": lint_groff}
    problems = []
    for name, linter in linters.items():
        if not shutil.which(name):
            print(f"not run: {name} on the man pages: no {name} here")
            continue
        for page in sorted(MAN.iterdir()):
            if not is_link(page):
                problems += [f"{name}: {line}" for line in linter(page)]
    return problems


CHECKS = [
    check_pages_exist,
    check_prototypes,
    check_sections,
    check_names_used,
    check_fields,
    check_format,
]
