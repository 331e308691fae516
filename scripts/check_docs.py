#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the code in the README and the documentation, and checks hand-written lists.

Every block of code is run: a page's Python blocks as one program; C after compiling it against
libvmem; shell commands in an empty directory, which is also $HOME. A block that cannot run
everywhere is followed by a line that says what it needs, with a link to the test, log or result
that shows it ran:

    *Needs a GPU. Result: [h100.json](../benchmarks/results/h100.json).*

A block of `text` right after a block that is run is its expected output; "..." in it matches
anything. Python that prints must have such a block. Other blocks of `text` are drawings or output
from elsewhere. This also checks that links to repository files are valid, that every error and
environment variable is listed, and that the README states the right version.

Run it with the Python of an environment that has pyvmem and torch. Prints "N passed, N failed".
"""

from __future__ import annotations

import argparse
import builtins
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vmem_header import HEADER, ROOT, version

from pyvmem.kvcache import KVCache

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")
# Files outside docs/ that are pages of the site.
TAKEN = (
    *("benchmarks/README.md", "benchmarks/*/*.md", "patches/README.md"),
    *("kernel_module/README.md", "tests/README.md", "tests/kernel/README.md"),
    "tests/kernel/softgpu/README.md",
)
README_LINES = 200
LIBRARY = ROOT / "build" / "lib"
NEEDS = re.compile(r"\n*\*Needs (?:(?!\n\n).)+?\. (?:Run by|Log|Result): (.+?)\*\n", re.S)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
PRINTS = re.compile(r"\n+```text\n(.*?)^```$", re.M | re.S)
END = "\0"  # printed between blocks
LINK = re.compile(r"\]\(([^)\s]+)\)")
CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.M)
BUILT_IN = {"Exception", *(one for one in dir(builtins) if one.endswith(("Error", "Warning")))}
PRIVATE = ("selftest", "bench", "commands")  # packages whose errors do not reach callers
SECONDS = 120.0  # timeout per block, far longer than any block takes


@dataclass(frozen=True)
class Block:
    """A block of code in a page.

    `needs` is empty if the block can run anywhere; otherwise it contains the link to the test, log
    or result that shows it ran.
    """

    page: Path
    line: int
    language: str
    code: str
    needs: str
    prints: str | None  # expected output, from the page


def pages() -> list[Path]:
    """Returns the files to check."""
    taken = [path for pattern in TAKEN for path in sorted(ROOT.glob(pattern))]
    return [ROOT / name for name in PAGES] + taken + sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        mark = NEEDS.match(text, match.end())
        code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
        line = text.count("\n", 0, match.start()) + 1
        after = PRINTS.match(text, match.end())
        yield Block(
            page, line, match[2], code, mark[1] if mark else "", after[1] if after else None
        )


def run(command: list[str], cwd: str, code: str = "", **env: str) -> tuple[str, str]:
    """Runs a program; returns its output, and a description of the problem if it failed."""
    paths = [str(ROOT / "build" / "venv" / "bin"), os.environ.get("PATH", "")]
    environment = {
        **os.environ,
        "PATH": ":".join(paths),
        "LD_LIBRARY_PATH": str(LIBRARY),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",  # the pages show the output of the `host` back end
        "COLUMNS": "80",
        **env,
    }
    try:
        done = subprocess.run(
            command,
            input=code,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=environment,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"timed out after {SECONDS:.0f} s"
    said = f"{done.stdout}{done.stderr}".replace(END, "").strip() or "failed"
    return done.stdout, said if done.returncode else ""


def check_output(block: Block, said: str) -> list[str]:
    """Compares a block's output with the page."""
    where = f"{block.page.relative_to(ROOT)}:{block.line}"
    if block.prints is None:
        silent = block.language != "python" or not said
        return [] if silent else [f"{where}: the page does not show what it prints:\n{said}"]
    pattern = ".*?".join(re.escape(part) for part in block.prints.split("..."))
    right = re.fullmatch(pattern, re.sub(r" +$", "", said, flags=re.M), re.S)
    return [] if right else [f"{where}: the page does not match what it prints:\n{said}"]


def run_python(found: list[Block]) -> list[str]:
    """Runs a page's blocks as one program, so that a block sees the names in earlier blocks."""
    page = found[0].page.relative_to(ROOT)
    program = ""
    for block in found:  # padded, so that tracebacks show the page's line numbers
        code = "\n" * block.line + block.code
        program += f"exec(compile({code!r}, {str(page)!r}, 'exec'))\n"
        program += f"print(end={END!r}, flush=True)\n"
    printed, said = run([sys.executable, "-W", "error", "-c", program], "/")
    if said:
        return [f"{page}: its Python fails:\n{said}"]
    parts = zip(found, printed.split(END), strict=False)
    return [problem for block, part in parts for problem in check_output(block, part)]


def run_c(block: Block) -> list[str]:
    """Compiles a program against libvmem and runs it."""
    with tempfile.TemporaryDirectory(prefix="vmem-docs-") as folder:
        source = Path(folder) / "program.c"
        source.write_text(block.code, encoding="utf-8")
        include = f"-I{HEADER.parent}"
        command = ["cc", "-Wall", "-Wextra", "-Werror", include, str(source), "-o", "program"]
        printed, said = run([*command, f"-L{LIBRARY}", "-lvmem"], folder)
        if not said:
            printed, said = run(["./program"], folder)
    return outcome(block, printed, said)


def run_shell(block: Block) -> list[str]:
    """Runs commands in an empty directory, which is also $HOME."""
    with tempfile.TemporaryDirectory(prefix="vmem-docs-") as folder:
        return outcome(block, *run(["sh", "-eu"], folder, block.code, HOME=folder))


def outcome(block: Block, printed: str, said: str) -> list[str]:
    """Returns the problems with a block that was run: its error, or a difference from the page."""
    if said:
        return [f"{block.page.relative_to(ROOT)}:{block.line}: {said}"]
    return check_output(block, printed)


def check_code(page: Path) -> tuple[int, list[str]]:
    """Runs a page's blocks except those with `needs`; returns the block count and the problems."""
    found = list(blocks(page))
    problems = []
    program = [one for one in found if one.language == "python" and not one.needs]
    if program:
        problems += run_python(program)
    for block in found:
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.needs:
            if not LINK.search(block.needs):
                problems.append(f"{where}: no link to the test, log or result that ran it")
        elif block.language == "c":
            problems += run_c(block)
        elif block.language == "sh":
            problems += run_shell(block)
        elif block.language not in ("python", "text"):
            problems.append(f"{where}: a block of {block.language or 'no language'}")
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"^!!! .*\n(?:\n|    .*\n)+", "", text, flags=re.M)
    for indented in re.findall(r"\n\n    (\S.*)", text):
        problems.append(f"{page.relative_to(ROOT)}: an indented block: {indented}")
    return len(found), problems


def check_links(page: Path) -> tuple[int, list[str]]:
    """Checks that the files linked from a page exist."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = [link.partition("#")[0] for link in LINK.findall(text)]
    local = [link for link in found if link and not re.match(r"[a-z]+:", link)]
    generated = (ROOT / "docs/reference/cli.md",)
    missing = [
        link
        for link in local
        if not (page.parent / link).exists() and (page.parent / link).resolve() not in generated
    ]
    return len(local), [f"{page.relative_to(ROOT)}: no file {link}" for link in missing]


def check_lists() -> tuple[int, list[str]]:
    """Checks that the required lists are complete; checks the README's version and length."""
    names, problems = check_errors()
    problems += check_reference()
    variables = environment_variables()
    listing = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    problems += [
        f"docs/reference/environment.md: no {name} ({path})"
        for name, path in sorted(variables.items())
        if not re.search(rf"`{name}\b", listing)
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if f"Version {version()}" not in readme:
        problems.append(f"README.md: it does not say 'Version {version()}'")
    if readme.count("\n") > README_LINES:
        problems.append(f"README.md: more than {README_LINES} lines")
    return names + len(variables) + 2, problems


def check_reference() -> list[str]:
    """Checks that KVCache's pages list exactly its public members."""
    pages = sorted((ROOT / "docs/reference/python").glob("kvcache*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"^::: pyvmem\.kvcache\.KVCache\.(\w+)$", text, re.M))
    names = {*dir(KVCache), *KVCache.__annotations__}
    members = {name for name in names if not name.startswith("_")}
    return compare("docs/reference/python/kvcache*.md", named, "KVCache", members)


def check_errors() -> tuple[int, list[str]]:
    """Checks that errors.md lists exactly the errors in the code, each with a cause and a remedy.

    The errors of the library and the kernel module are the errnos that their C code returns, which
    their headers must list as well; Python's errors are the package's classes.
    """
    page = "docs/reference/errors.md"
    library, kernel, rest = errors_page((ROOT / page).read_text(encoding="utf-8"))
    problems = [f"{page}: no remedy, or no cause, for {one}" for one in rest["incomplete"]]
    classes = [one for one in error_classes() if one != "VMemError"]  # the base class has no row
    problems += [f"{page}: no {one}" for one in classes if one not in rest["python"]]
    listed = HEADER.read_text(encoding="utf-8").split("#ifndef VMEM_H")[0]
    header = set(re.findall(r"^ \*   -(E\w+) ", listed, re.M))
    # These calls record an error. Other negative values come from the system and are translated.
    code = returned("libvmem/src", r"vm_fail(?:_at)?\((?:[^,;]*\?)?[^,;]*?-(E[A-Z0-9]+)\b")
    problems += compare(page, library, HEADER.name, header) + compare(
        HEADER.name, header, "libvmem/src", code
    )
    abi = (ROOT / "kernel_module/uvm_vmem_ioctl.h").read_text(encoding="utf-8")
    header = set(
        re.findall(r"^ \*   (E[A-Z0-9]+) ", abi.split("#ifndef UVM_VMEM_IOCTL_H")[0], re.M)
    )
    code = returned("kernel_module", r"-(E[A-Z0-9]+)\b(?=[;),: ])", ".c")
    problems += compare(page, kernel, "uvm_vmem_ioctl.h", header)
    problems += compare("uvm_vmem_ioctl.h", header, "kernel_module", code)
    return len(classes) + len(library) + len(kernel), problems


def errors_page(text: str) -> tuple[set[str], set[str], dict[str, list[str]]]:
    """Reads errors.md; returns the errnos of the library and of the kernel module, and the rest.

    The rest has two entries: "python" lists the Python errors, and "incomplete" lists the names in
    rows that have an empty cell.
    """
    tables: dict[str, set[str]] = {"": set(), "From the kernel module": set()}
    python: list[str] = []
    incomplete: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) < 3:
            continue
        names = re.findall(r"`([A-Za-z]\w+)`", " ".join(cells[: len(cells) - 2]))
        if not all(cells):
            incomplete += names[:1]
        tables.setdefault(section, set()).update(one for one in names if one.isupper())
        python += [one for one in names if not one.isupper()]
    found = {"python": python, "incomplete": incomplete}
    return tables[""], tables["From the kernel module"], found


def returned(folder: str, pattern: str, suffix: str = "") -> set[str]:
    """Returns the errnos that a pattern finds in the C code under a directory, except comments."""
    found: set[str] = set()
    for path in sorted((ROOT / folder).rglob(f"*{suffix or '.[ch]'}")):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.S)
        found.update(re.findall(pattern, code))
    return found


def compare(one: str, first: set[str], other: str, second: set[str]) -> list[str]:
    """Returns a message for each name that only one of the two lists has."""
    said = [f"{one}: no {name}, which is in {other}" for name in sorted(second - first)]
    return said + [f"{one}: {name}, which is not in {other}" for name in sorted(first - second)]


def error_classes() -> list[str]:
    """Returns the package's public exceptions and warnings."""
    package = ROOT / "pyvmem"
    found: list[str] = []
    for path in [package / "errors.py", *sorted(package.rglob("*.py"))]:  # base classes first
        if path.relative_to(package).parts[0] in PRIVATE:
            continue
        for name, bases in CLASS.findall(path.read_text(encoding="utf-8")):
            known = BUILT_IN.union(found) & set(re.findall(r"\w+", bases))
            if known and not name.startswith("_"):
                found.append(name)
    return list(dict.fromkeys(found))


def environment_variables() -> dict[str, str]:
    """Returns the environment variables that our programs read, each with a file that reads it."""
    found = {}
    own = re.compile(r"""environ(?:\.get\(|\[)\s*["']((?:(?:VMEM|NV|LINUX|SIGN)_\w+)|ALLOW)["']""")
    for folder in ("pyvmem", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in own.findall(path.read_text(encoding="utf-8")):
                found[name] = path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "libvmem" / "src").rglob("*.c")):
        for name in re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8")):
            found[name] = path.relative_to(ROOT).as_posix()
    return found


def main() -> int:
    """Runs the checks and prints the problems."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="check only these files")
    chosen = [path.resolve() for path in parser.parse_args().pages]
    problems: list[str] = []
    count = 0
    with ThreadPoolExecutor(max_workers=2) as pool:  # the threads only wait for programs
        for answers in pool.map(
            lambda page: (check_code(page), check_links(page)), chosen or pages()
        ):
            for number, wrong in answers:
                count += number
                problems += wrong
    if not chosen:
        number, wrong = check_lists()
        count += number
        problems += wrong
    for problem in problems:
        print(problem)
    print(f"{max(0, count - len(problems))} passed, {len(problems)} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
