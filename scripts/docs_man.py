# SPDX-License-Identifier: MIT
"""Converts man pages (mdoc) to Markdown with embedded HTML, for the documentation site.

Supports the macros that libvmem's pages use and raises MdocError for any other, so that nothing is
dropped silently.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from pathlib import Path

__all__ = ["MdocError", "convert", "names_of"]

STYLED = {
    "Ar": "var",
    "Cm": "code",
    "Dv": "code",
    "Em": "em",
    "Er": "code",
    "Ev": "code",
    "Fa": "code",
    "Fl": "code",
    "Li": "code",
    "Nm": "code",
    "Pa": "code",
    "Va": "code",
    "Vt": "code",
}
QUOTED = {"Bq": ("[", "]"), "Dq": ("“", "”"), "Op": ("[", "]"), "Pq": ("(", ")"), "Qq": ('"', '"')}
OTHER = {"Fn", "No", "Ns", "Sx", "Xr"}
OPENING, CLOSING = set("(["), set(".,:;)]?!")
LIB = {"Sh": "##", "Ss": "###"}
WIDTH = 76  # maximum line width of a declaration
STANDARD_EXIT = "The command exits 0 on success, and above 0 if an error occurs."


class MdocError(Exception):
    """Raised for a macro that this converter does not support."""


def words_of(line: str) -> list[str]:
    """Returns the words of a macro line. Quoted words lose their quotes and are never macros."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.quotes, lexer.escape, lexer.commenters = True, '"', "", ""
    return list(lexer)


def text_of(text: str) -> str:
    """Converts text with roff's escapes to HTML."""
    return html.escape(text.replace("\\e", "\\").replace("\\&", ""), quote=False)


def declaration(name: str, arguments: list[str]) -> str:
    """Returns a function's C declaration, broken into lines that fit on a page."""
    line = f"{name}({', '.join(arguments)});"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + ",\n".join(f"    {one}" for one in arguments) + "\n);"


class Inline:
    """Renders a line's macros, from left to right."""

    def __init__(self, words: list[str], link: Callable[[str, str], str], name: str) -> None:
        self._words, self._at = words, 0
        self._link, self._name = link, name

    def render(self) -> str:
        """Returns the remaining words as HTML."""
        pieces: list[str] = []
        glue = True
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if word == "Ns":
                glue = True
                continue
            piece = self._macro(word)
            closing = word in CLOSING
            pieces.append(piece if glue or closing else f" {piece}")
            glue = word in OPENING
        return "".join(pieces)

    def _macro(self, word: str) -> str:
        if word in QUOTED:
            first, last = QUOTED[word]
            inner, tail = self._rest()
            return f"{first}{inner}{last}{tail}"
        if word == "Xr":
            page, section = self._take(), self._take()
            return self._link(page, section)
        if word == "Fn":
            return f"<code>{text_of(self._take())}()</code>"
        if word in ("No", "Sx"):
            return " ".join(map(text_of, self._arguments()))
        if word in STYLED:
            return self._styled(word)
        if re.fullmatch(r"[A-Z][a-z]|%[A-Z]", word):
            raise MdocError(f"unknown macro {word} in: {' '.join(self._words)}")
        return text_of(word)

    def _styled(self, macro: str) -> str:
        """Returns the macro's words, styled; as in mdoc, the style continues after a comma."""
        tag = STYLED[macro]
        arguments = self._arguments()
        if macro == "Nm" and not arguments:
            arguments = [self._name]
        if macro == "Fl":
            arguments = [f"-{one}" for one in arguments]
        shown = f"<{tag}>{text_of(' '.join(arguments))}</{tag}>"
        if self._words[self._at : self._at + 1] == [","] and self._at + 1 < len(self._words):
            following = self._words[self._at + 1]
            if following not in STYLED and following not in QUOTED and following not in OTHER:
                self._at += 1
                shown += f", {self._styled(macro)}"
        return shown

    def _arguments(self) -> list[str]:
        found = []
        while self._at < len(self._words):
            word = self._words[self._at]
            if word in STYLED or word in QUOTED or word in OTHER or word in CLOSING:
                break
            found.append(word)
            self._at += 1
        return found

    def _take(self) -> str:
        word = self._words[self._at]
        self._at += 1
        return word

    def _rest(self) -> tuple[str, str]:
        """Returns the words that a quoting macro encloses, and the punctuation after them."""
        words = self._words[self._at :]
        tail = ""
        while words and words[-1] in CLOSING:
            tail = words.pop() + tail
        self._at = len(self._words)
        return Inline(words, self._link, self._name).render(), tail


class Page:
    """Converts a page, line by line."""

    def __init__(self, text: str, link: Callable[[str, str], str]) -> None:
        self._lines = [line for line in text.splitlines() if not line.startswith('.\\"')]
        self._link = link
        self._out: list[str] = []
        self._paragraph: list[str] = []
        self._lists: list[bool] = []  # for each open list, whether an item is open
        self._name = ""
        self._section = ""
        self._hold = ""  # an opening parenthesis to put before the next word

    def convert(self) -> str:
        """Returns the page as Markdown."""
        lines = iter(self._lines)
        for line in lines:
            if not line.startswith("."):
                if self._section != "LIBRARY":
                    self._add(text_of(line))
            elif self._section == "SYNOPSIS" and line[1:3] in ("Ft", "Fo", "Fn", "In"):
                self._prototype(line, lines)
            else:
                self._request(line, lines)
        self._flush()
        return "\n".join(self._out) + "\n"

    def _request(self, line: str, lines: object) -> None:
        macro, _, rest = line[1:].partition(" ")
        words = words_of(rest)
        if macro in ("Dd", "Dt", "Os"):
            return
        if macro in ("Sh", "Ss"):
            self._flush()
            self._section = rest.strip('"') if macro == "Sh" else self._section
            if rest not in ("NAME", "LIBRARY"):
                title = rest.strip('"').capitalize() if macro == "Sh" else rest.strip('"')
                self._out += ["", f"{LIB[macro]} {title}", ""]
            return
        if self._section == "LIBRARY":
            return
        if self._section == "NAME":
            if macro == "Nm":
                self._name = self._name or words[0]
            if macro == "Nd":
                said = text_of(rest)
                said = f"{said[:1].upper()}{said[1:]}."
                self._out += ["", f"<p class='man-summary'>{said}</p>", ""]
            return
        handler = getattr(self, f"_do_{macro.replace('%', '')}", None)
        if handler is not None:
            handler(words, lines)
            return
        if macro == "Nm" and self._section == "SYNOPSIS":
            self._flush()
        self._add(Inline([macro, *words], self._link, self._name).render())

    def _do_Pp(self, _words: list[str], _lines: object) -> None:
        self._flush()

    def _do_Po(self, words: list[str], _lines: object) -> None:
        self._add(Inline(words, self._link, self._name).render())
        self._hold = "("

    def _do_Pc(self, words: list[str], _lines: object) -> None:
        self._paragraph[-1] += ")" + "".join(words)

    def _do_Dl(self, words: list[str], _lines: object) -> None:
        self._flush()
        self._out += [f"<pre><code>{text_of(' '.join(words))}</code></pre>", ""]

    def _do_Ex(self, _words: list[str], _lines: object) -> None:
        self._add(STANDARD_EXIT)

    def _do_Rs(self, _words: list[str], lines: object) -> None:
        parts = []
        for line in lines:  # type: ignore[attr-defined]
            if line == ".Re":
                break
            parts.append(text_of(line[4:]))
        self._flush()
        self._add(", ".join(parts) + ".")
        self._flush()

    def _do_Bd(self, _words: list[str], lines: object) -> None:
        self._flush()
        body = []
        for line in lines:  # type: ignore[attr-defined]
            if line == ".Ed":
                break
            body.append(text_of(line))
        self._out += ["<pre><code class='language-c'>" + "\n".join(body) + "</code></pre>", ""]

    def _do_Bl(self, _words: list[str], _lines: object) -> None:
        self._flush()
        self._lists.append(False)
        self._out.append("<dl class='man'>")

    def _do_It(self, words: list[str], _lines: object) -> None:
        self._flush()
        if self._lists[-1]:
            self._out.append("</dd>")
        self._out.append(f"<dt>{Inline(words, self._link, self._name).render()}</dt>")
        self._out.append("<dd>")
        self._lists[-1] = True

    def _do_El(self, _words: list[str], _lines: object) -> None:
        self._flush()
        self._out += ["</dd>", "</dl>", ""]
        self._lists.pop()

    def _prototype(self, line: str, lines: object) -> None:
        macro, _, rest = line[1:].partition(" ")
        self._flush()
        words = words_of(rest)
        if macro == "In":
            self._code(f"#include <{words[0]}>")
        elif macro == "Ft":
            self._code(" ".join(words), prefix="\n")
        elif macro == "Fn":
            self._code(declaration(words[0], words[1:]))
        else:
            arguments = []
            for other in lines:  # type: ignore[attr-defined]
                if other == ".Fc":
                    break
                arguments += words_of(other[4:])
            self._code(declaration(words[0], arguments))

    def _code(self, text: str, prefix: str = "") -> None:
        """Appends to the SYNOPSIS's single code block."""
        shown = text_of(text)
        end = "</code></pre>"
        if self._out and self._out[-1].endswith(end):
            self._out[-1] = self._out[-1].removesuffix(end) + "\n" + prefix + shown + end
        else:
            self._out.append(f"<pre><code class='language-c'>{shown}{end}")

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._hold:
            text, self._hold = self._hold + text, ""
        if text[0] in CLOSING and self._paragraph:
            self._paragraph[-1] += text
        else:
            self._paragraph.append(text)

    def _flush(self) -> None:
        if self._paragraph:
            self._out += ["<p>" + "\n".join(self._paragraph) + "</p>", ""]
            self._paragraph = []


def names_of(folder: Path) -> dict[str, Path]:
    """Returns the pages by ``name.section``, excluding those that only link to another page."""
    return {
        path.name: path
        for path in sorted(folder.glob("*.[1-9]"))
        if not path.read_text(encoding="utf-8").startswith(".so ")
    }


def convert(path: Path, link: Callable[[str, str], str]) -> str:
    """Converts a page to Markdown, without its title.

    Args:
        path: the mdoc source.
        link: returns the HTML of a reference to a man page, given the page's name and section.
    """
    try:
        return Page(path.read_text(encoding="utf-8"), link).convert()
    except MdocError as error:
        raise MdocError(f"{path.name}: {error}") from error
