# SPDX-License-Identifier: MIT
"""The programs that build and check the documentation report the errors that they
should.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import check_docs
import docs_man
import docs_site
import pytest
import readme_format
import readme_metrics

PAGE = """.Sh NAME
.Nm vmem_x
.Nd an example of GPUs
.Sh SYNOPSIS
.In vmem.h
.Ft int
.Fo vmem_x
.Fa "vmem_t vm"
.Fc
.Sh DESCRIPTION
.Fn vmem_x
takes
.Fa a , b
.Pq see Xr vmem_y 3 .
.Bl -tag -width Er
.It Bq Er EINVAL
A < B.
.El
"""
NESTED = """.Sh DESCRIPTION
.Bl -tag -width Ds
.It Fa flags
.Bl -tag -width Ds
.It Dv ONE
first
.It Dv TWO
second
.El
.It Fa rest
zero
.El
"""


def link(name: str, section: str) -> str:
    """Renders a link; stands in for the site's own function."""
    return f"<{name}.{section}>"


def test_a_man_page(tmp_path: Path) -> None:
    path = tmp_path / "vmem_x.3"
    path.write_text(PAGE)
    out = docs_man.convert(path, link)
    assert "#include &lt;vmem.h&gt;\n\nint\nvmem_x(vmem_t vm);" in out
    assert "<code>a</code>, <code>b</code>\n(see <vmem_y.3>)." in out
    assert "<p class='man-summary'>An example of GPUs.</p>" in out
    assert "<dt>[<code>EINVAL</code>]</dt>" in out
    assert "A &lt; B." in out


def test_lists_in_lists(tmp_path: Path) -> None:
    path = tmp_path / "vmem_x.3"
    path.write_text(NESTED)
    tags = re.findall(r"</?d[ltd]\b", docs_man.convert(path, link))
    inner = "<dl <dt </dt <dd </dd <dt </dt <dd </dd </dl"
    assert " ".join(tags) == f"<dl <dt </dt <dd {inner} </dd <dt </dt <dd </dd </dl"


def test_an_unknown_macro_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "vmem_x.3"
    path.write_text(PAGE + ".Zz what\n")
    with pytest.raises(docs_man.MdocError, match=r"vmem_x\.3: unknown macro Zz"):
        docs_man.convert(path, link)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "AssertionError"),
        ("```sh\nfalse\n```\n", "failed"),
        ("```python\nprint(1)\n```\n", "page.md:1: the page does not show what it prints:\n1\n"),
        (
            "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n",
            "page.md:5: the page does not match what it prints:\n1\n",
        ),
        ("```sh\necho 1 2\n```\n\n```text\n1 ... 2\n```\n", "not match what it prints:\n1 2\n"),
        ("```\nwhat\n```\n", "a block of no language"),
        ("text\n\n    code\n", "an indented block: code"),
        (
            "```sh\nfalse\n```\n\n*Needs a GPU. Log: none.*\n",
            "no link to the test, log or result that ran it",
        ),
        ("[there](nowhere.md)\n", "no file nowhere.md"),
    ],
)
def test_errors_of_a_page(
    text: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    problems = check_docs.check_code(page)[1] + check_docs.check_links(page)[1]
    assert len(problems) == 1
    assert wrong in problems[0]


def test_a_correct_page_has_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.log").write_text("")
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n\nSo:\n\n```text\nany\n```\n\n"
        "```sh\nfalse\n```\n\n*Needs a GPU. Log: [run](run.log).*\n"
    )
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    assert check_docs.check_code(page) == (4, [])
    assert check_docs.check_links(page) == (1, [])


def test_output_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\nprint('a b c ')\n```\n\n```text\n1\na ... c\n```\n\n"
        "```python\nx = 2\n```\n\nas it\n\n```text\ncould be\n```\n\n"
        "```sh\nseq 9\n```\n\n```text\n1\n2\n...\n9\n```\n\n```sh\nseq 9\n```\n"
    )
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    assert check_docs.check_code(page) == (7, [])


def test_dead_links_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="here">x</h1><a href="../">up</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">1</a><a href="a/#gone">2</a><a href="b/">3</a>'
        '<script src="https://elsewhere/x.js"></script><link rel="preconnect" href="//fonts">'
    )
    (tmp_path / "404.html").write_text('<a href="/a/#here">1</a><a href="/c/">2</a>')
    (tmp_path / "x.css").write_text("a { background: url('//elsewhere/y.png') url(z.png) }")
    monkeypatch.setattr(docs_site, "SITE", tmp_path)
    assert docs_site.check_site() == [
        "404.html: no page /c/",
        "index.html: no part a/#gone",
        "index.html: no page b/",
        "index.html: loads https://elsewhere/x.js from another host",
        "index.html: loads //fonts from another host",
        "x.css: loads //elsewhere/y.png from another host",
    ]


def test_links_of_a_site_below_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error page (404.html) uses absolute links, which on a forge start with the repository's
    name.
    """
    (tmp_path / "index.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "404.html").write_text(
        '<a href="/vmem/">1</a><a href="/vmem/#here">2</a><a href="/#here">3</a>'
    )
    monkeypatch.setattr(docs_site, "SITE", tmp_path)
    monkeypatch.setenv("SITE_URL", "https://forge.example/vmem/")
    assert docs_site.check_site() == ["404.html: no page /#here"]


# Stands in for the theme's search worker and records the messages that our script passes on.
WORKER = "addEventListener('message', event => said.push(event.data.data));"


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_site_search_finds_options_as_written() -> None:
    queries = ["--backend", "serve --kv-cache-dtype", "-h", '"--out x"', "[-q]", "prefix-map", "-"]
    ours = (check_docs.ROOT / "scripts" / "docs_search.js").read_text()
    page = "const said = [], heard = []; const addEventListener = (_, one) => heard.push(one);"
    events = json.dumps([{"data": {"data": one}} for one in [{"lang": ["en"]}, *queries]])
    send = f"for (const event of {events}) for (const one of heard) one(event);"
    program = "\n".join([page, ours, WORKER, send, "console.log(JSON.stringify(said))"])
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    options, *said = json.loads(done.stdout)
    assert options == {"lang": ["en"]}, "what is no query is left alone"
    words = ["backend", "serve kv-cache-dtype", "h", '" out x"', "[ q]", "prefix-map", ""]
    assert [" ".join(one.split()) for one in said] == words


def luminance(colour: str) -> float:
    """Returns a color's relative luminance as defined by WCAG."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colors as defined by WCAG."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("scheme", "page"), [("default", "#ffffff"), ("slate", "#1e2129")])
def test_drawings_have_enough_contrast(scheme: str, page: str) -> None:
    css = (check_docs.ROOT / "docs" / "assets" / "extra.css").read_text()
    block = re.search(rf'\[data-md-color-scheme="{scheme}"\] {{([^}}]*--d-ink[^}}]*)}}', css)
    assert block
    colours = dict(re.findall(r"--d-(\w+): (#\w{6});", block[1]))
    for ground in (page, *(colours[name] for name in ("a", "b", "c", "none"))):
        assert contrast(colours["ink"], ground) >= 4.5, ground
    assert contrast(colours["soft"], page) >= 4.5
    for path in sorted((check_docs.ROOT / "docs" / "drawings").glob("*.svg")):
        text = path.read_text()
        inks = re.findall(r'<text[^>]*fill="var\(--d-(\w+), ', text)
        assert len(inks) == text.count("<text"), f"{path.name}: text in a colour of its own"
        assert set(inks) <= {"ink", "soft"}, path.name
        if scheme == "default":  # a drawing's fallback colors must equal the page's
            own = set(re.findall(r"--d-(\w+), (#\w{6})\)", text))
            assert own <= set(colours.items()), path.name


def test_charts_have_a_white_background() -> None:
    docs = check_docs.ROOT / "docs"
    own = (
        "drawings",
        "operations",
    )  # drawings adapt to the color scheme; terminal screenshots keep their colors
    charts = [path for path in docs.rglob("*.svg") if path.parent.name not in own]
    assert charts
    for path in charts:
        ground = re.search(r"<path [^>]*style=\"([^\"]*)\"", path.read_text())
        assert ground, path.name
        assert ground[1] == "fill: #ffffff", f"{path.name}: the dark scheme inverts it"


def test_columns_of_words_are_left_aligned() -> None:
    body = [["`fa3`", "prefill", "191", ""], ["`sdpa`", "decode", "", "1 ms"]]
    rows = readme_format.table(["kernel", "phase", "rows", "time"], body)
    assert rows[1] == "| --- | --- | ---: | ---: |"


def test_the_table_of_metrics() -> None:
    rows = readme_metrics.part()
    assert len({row.count("|") for row in rows}) == 1
    assert (
        "| `pyvmem_steps_total` | counter | `call`: `step`, `step_async` "
        "| Calls that returned 0, by call. |" in rows
    )
    (waits,) = (row for row in rows if "`pyvmem_wait_seconds`" in row)
    assert "| histogram |  |" in waits, "neither `cache` nor `le` is listed for each"
    (info,) = (row for row in rows if "`pyvmem_cache_info`" in row)
    assert "`backend`; `device`; `driver`" in info, "no values that depend on the machine"


def test_errors_that_must_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pyvmem"
    (package / "a").mkdir(parents=True)
    (package / "bench").mkdir()
    (package / "errors.py").write_text("class Base(Exception):\n    pass\n")
    (package / "a" / "one.py").write_text(
        "class One(Base, ValueError):\n    pass\n\nclass Plain(Protocol):\n    pass\n\n"
        "class _Hidden(OSError):\n    pass\n\nclass Two(one.One):\n    pass\n"
    )
    (package / "bench" / "two.py").write_text("class Three(Exception):\n    pass\n")
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    assert check_docs.error_classes() == ["Base", "One", "Two"]


ERRORS = """# Errors

| C | Python | cause | remedy |
| --- | --- | --- | --- |
| `EINVAL` | `InvalidArgument` | a number | the text |
| `EIO` | `DriverError` | the driver | |

## From the cache

| Python | cause | remedy |
| --- | --- | --- |
| `Lost`, `Gone` | memory | preempt |

## From the kernel module

| errno | cause | remedy |
| --- | --- | --- |
| `E2BIG` | too long | shorter |
"""


def test_the_page_of_errors() -> None:
    library, kernel, rest = check_docs.errors_page(ERRORS)
    assert library == {"EINVAL", "EIO"}
    assert kernel == {"E2BIG"}
    assert rest == {
        "python": ["InvalidArgument", "DriverError", "Lost", "Gone"],
        "incomplete": ["EIO"],
    }


def test_lists_of_errors_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.c").write_text(
        "int f(void) { return -EINTR; } // -EPERM\n/* -EXDEV */ ret = late ? -EBUSY : g();\n"
    )
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    found = check_docs.returned("src", r"-(E[A-Z0-9]+)\b")
    assert found == {"EINTR", "EBUSY"}
    assert check_docs.compare("page", {"EIO", "EBUSY"}, "code", found) == [
        "page: no EINTR, which is in code",
        "page: EIO, which is not in code",
    ]


def test_every_error_has_a_cause_and_a_remedy() -> None:
    count, problems = check_docs.check_errors()
    assert problems == []
    assert count > 0
