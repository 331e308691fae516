# SPDX-License-Identifier: MIT
"""MkDocs hooks that add pages and convert links, drawings and tables.

Some pages are files from elsewhere in the repository (TAKEN); man pages and the command-line
reference are generated. Links are relative to the file that contains them, so that they work in the
repository as well; the hooks turn them into links to the page, or to a copy of the file under
files/. A broken link is a warning, which `make docs` turns into an error.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import docs_man
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.docs_hooks")

ROOT = Path(__file__).resolve().parent.parent
MAN = ROOT / "libvmem" / "man"

# Maps the site's pages to files in the repository.
TAKEN = {
    "benchmarks/method.md": "benchmarks/README.md",
    **{
        f"benchmarks/{path.parent.name}.md": path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("benchmarks/*/README.md"))
    },
    **{
        f"benchmarks/{path.parent.name}-results.md": path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("benchmarks/*/RESULTS.md"))
    },
    "driver/patches.md": "patches/README.md",
    "driver/kernel-module.md": "kernel_module/README.md",
    "develop/tests.md": "tests/README.md",
    "develop/driver-tests.md": "tests/kernel/README.md",
    "develop/software-gpu.md": "tests/kernel/softgpu/README.md",
    "develop/contributing.md": "CONTRIBUTING.md",
    "security/report.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
# Suffixes of files that browsers show instead of downloading.
SHOWN = {".json", ".svg", ".txt", ".png"}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)(```+|~~~+)", re.M)
INCLUDE = re.compile(r"^<!-- include (\S+) (\w+) -->$", re.M)
TABLE = re.compile(r"<table>.*?</table>", re.S)
LONG = 6  # on a long page, tables with more rows than this can be folded
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.S)
CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
# mkdocstrings parses "a, b, c: text" in a docstring as a name "a," with type "b, c".
NAMES = re.compile(
    r"<b><code>(<autoref[^>]*>\w+,</autoref>)</code></b>\s*\(<code>(.*?)</code>\)", re.S
)
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", re.M)


def page_of(path: str) -> str | None:
    """Returns the site's page for a file in the repository, or None if it has none."""
    if path == "README.md":
        return "index.md"
    if path == "libvmem/man":
        return "reference/c/index.md"
    if path.startswith("libvmem/man/"):
        name, _, section = path.removeprefix("libvmem/man/").rpartition(".")
        return man_page(name, section)
    if path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
        return path.removeprefix("docs/")
    return next((page for page, taken in TAKEN.items() if taken == path), None)


def source_of(page: str) -> str:
    """Returns the repository file that a page shows or is generated from."""
    if page.startswith("files/"):
        return page.removeprefix("files/")
    return TAKEN.get(page, f"docs/{page}")


def copy_name(path: str) -> str:
    """Returns a repository file's path on the site."""
    suffix = "" if posixpath.splitext(path)[1] in SHOWN else ".txt"
    shown = "/".join(part.lstrip(".") for part in path.split("/"))  # MkDocs ignores dot files
    return f"files/{shown}{suffix}"


def man_page(name: str, section: str) -> str:
    """Returns the site's page for a man page."""
    return f"reference/c/{name}.{section}.md"


def man_link(name: str, section: str) -> str:
    """Returns HTML for a reference from one man page to another."""
    shown = f"<code>{name}({section})</code>"
    path = MAN / f"{name}.{section}"
    if not path.exists():
        return shown
    text = path.read_text(encoding="utf-8")
    if text.startswith(".so "):
        name, _, section = text.split("/")[-1].strip().rpartition(".")
    return f'<a href="../{name}.{section}/">{shown}</a>'


def man_index(pages: dict[str, Path]) -> str:
    """Returns a page that lists the man pages by section, with their descriptions."""
    lines = [
        "# C library",
        "",
        "These pages are libvmem's man pages: `man 7 vmem` after `make install`. The header is",
        "[vmem.h](../../../libvmem/include/vmem.h); complete programs are in",
        "[libvmem/examples](../../../libvmem/examples).",
        "",
    ]
    titles = {"7": "Overview", "1": "Command", "3": "Functions"}
    for section, title in titles.items():
        lines += [f"## {title}", "", "| page | what it does |", "| --- | --- |"]
        for name, path in pages.items():
            if name.endswith(section):
                text = path.read_text(encoding="utf-8")
                names = re.findall(r"^\.Nm (\w+)", text.split(".Sh LIBRARY")[0], re.M)
                summary = re.search(r"^\.Nd (.*)$", text, re.M)
                shown = ", ".join(f"`{one}`" for one in dict.fromkeys(names))
                lines.append(f"| [{shown}]({name}.md) | {summary[1] if summary else ''} |")
        lines.append("")
    return "\n".join(lines)


def command_line(*words: str) -> str:
    """Returns the command-line reference, generated from the parsers."""
    command = [sys.executable, str(ROOT / "scripts" / "docs_cli.py"), *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'src'}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"the command-line reference: {done.stderr}")
    return done.stdout


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the man pages to the navigation."""
    pages = docs_man.names_of(MAN)
    order = sorted(pages, key=lambda name: (-int(name[-1]) if name[-1] in "17" else 0, name))
    entries: list[object] = ["reference/c/index.md"]
    entries += [{name[:-2] + f"({name[-1]})": f"reference/c/{name}.md"} for name in order]

    def fill(items: list[object]) -> None:
        for item in items:
            if isinstance(item, dict):
                for title, value in item.items():
                    if value == "reference/c/":
                        item[title] = entries
                    elif isinstance(value, list):
                        fill(value)

    fill(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds included and generated pages."""
    made = {page: (ROOT / path).read_text(encoding="utf-8") for page, path in TAKEN.items()}
    pages = docs_man.names_of(MAN)
    made["reference/c/index.md"] = man_index(pages)
    for name, path in pages.items():
        title, _, section = name.rpartition(".")
        made[man_page(title, section)] = f"# {title}({section})\n\n" + docs_man.convert(
            path, man_link
        )
    made["reference/cli.md"] = command_line()
    made["reference/bench.md"] = command_line("bench")
    made["reference/bench-serving.md"] = command_line("bench-serving")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    prepare(files, config)
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Warns about an index page that would become its section's page."""
    for section in (item for item in nav.items if isinstance(item, Section)):
        for child in section.children[1:]:
            if isinstance(child, Page) and child.is_index:
                log.warning("mkdocs.yml: %s hides %s", section.title, child.file.src_uri)
    return nav


def publish(path: str, files: Files, config: MkDocsConfig) -> str:
    """Puts a repository file or a directory's listing on the site and returns its name there."""
    if (ROOT / path).is_dir():
        name = f"files/{path.strip('/')}/index.md"
        if files.get_file_from_path(name) is None:
            found = sorted(one.name for one in (ROOT / path).iterdir() if one.is_file())
            rows = [f"- [{one}]({one})" for one in found]
            for one in found:
                publish(f"{path.strip('/')}/{one}", files, config)
            text = "\n".join([f"# {path.strip('/')}", "", *rows, ""])
            files.append(File.generated(config, name, content=text))
        return name
    name = copy_name(path)
    if files.get_file_from_path(name) is None:
        file = File.generated(config, name, abs_src_path=str(ROOT / path))
        files.append(file)
    return name


def prepare(files: Files, config: MkDocsConfig) -> None:
    """Publishes the targets of links before any page is rendered."""
    for file in list(files.documentation_pages()):
        source = source_of(file.src_uri)
        for _, target, _ in LINK.findall(outside_code(file.content_string)):
            path = repository_path(target, source)
            if path and page_of(path) is None and (ROOT / path).exists():
                publish(path, files, config)


def outside_code(text: str) -> str:
    """Returns the text without its fenced blocks."""
    return re.sub(r"^ *(```+).*?^ *\1 *$", "", text, flags=re.M | re.S)


def repository_path(target: str, source: str) -> str | None:
    """Returns the repository file that a link points to, or None if it points elsewhere."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolves includes, drawings and links."""
    source = source_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def include(match: re.Match[str]) -> str:
        text = (ROOT / match[1]).read_text(encoding="utf-8")
        return f"```{match[2]}\n{text}```"

    def draw(match: re.Match[str]) -> str:
        path = repository_path(match[2], source)
        if path is None or not path.startswith("docs/drawings/"):
            return f'<figure class="drawing" tabindex="0" markdown="span">{match[0]}</figure>'
        svg = (ROOT / path).read_text(encoding="utf-8")
        svg = re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", svg, flags=re.S)
        svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.S)
        svg = re.sub(r"\n\s*\n", "\n", svg).strip()
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{match[1]}"', 1)
        return f'<figure class="drawing" tabindex="0">{svg}</figure>'

    def link(match: re.Match[str]) -> str:
        path = repository_path(match[2], source)
        if path is None:
            return match[0]
        _, mark, anchor = match[2].partition("#")
        target = page_of(path)
        if target is None and (ROOT / path).is_dir():
            target = page_of(f"{path}/README.md")
        if target is None and (ROOT / path).is_dir():
            target = f"files/{path}/index.md"
        elif target is None:
            target = copy_name(path)
        if files.get_file_from_path(target) is None:
            log.warning("%s: no file %s", source, match[2])
            return match[0]
        return f"{match[1]}{posixpath.relpath(target, here or '.')}{mark}{anchor}{match[3]}"

    markdown = INCLUDE.sub(include, markdown)
    markdown = DRAWING.sub(draw, markdown)
    parts = re.split(r"(^ *(?:```+).*?^ *```+ *$)", markdown, flags=re.M | re.S)
    return "".join(part if k % 2 else LINK.sub(link, part) for k, part in enumerate(parts))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks table cells and options that must not wrap or that need width; folds long tables.

    Also applies one format to names that a docstring describes together, as in "a, b: text".
    """

    def cell(match: re.Match[str], columns: int) -> str:
        text = re.sub(r"<[^>]+>", "", match[2])
        short = len(text) <= 12 and "(" not in text
        long = "long" if len(text) > 90 and columns > 3 else "middle" if len(text) > 35 else ""
        name = "short" if short else long
        return f'<td{match[1]} class="{name}">{match[2]}</td>' if name else match[0]

    def table(match: re.Match[str]) -> str:
        columns = match[0].partition("</tr>")[0].count("<th")
        wide = columns > 2
        text = CELL.sub(lambda found: cell(found, columns), match[0]) if wide else match[0]
        rows = text.count("<tr>") - 1
        if rows < LONG:
            return text
        summary = f"<summary>Table of {rows} rows</summary>"
        return f'<details class="rows" open>{summary}{text}</details>'

    def code(match: re.Match[str]) -> str:
        return OPTION.sub(r'<span class="option">\g<0></span>', match[0])

    def names(match: re.Match[str]) -> str:
        found = re.findall(r"\w+", re.sub(r"<[^>]+>", "", match[1] + match[2]))
        return ", ".join(f"<b><code>{name}</code></b>" for name in found)

    html = NAMES.sub(names, TABLE.sub(table, html))
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.S)
    return "".join(part if k % 2 else CODE.sub(code, part) for k, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Gives the search dialog an accessible name, which the theme omits."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def on_post_build(config: MkDocsConfig) -> None:
    """Prepends our query rewriting to the theme's search worker."""
    query = (ROOT / "scripts" / "docs_search.js").read_text(encoding="utf-8")
    workers = sorted(Path(config.site_dir).glob("assets/javascripts/workers/search.*.js"))
    if len(workers) != 1:
        log.warning("the theme has %d search workers, not one", len(workers))
    for worker in workers:
        worker.write_text(query + worker.read_text(encoding="utf-8"), encoding="utf-8")
