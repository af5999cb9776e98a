# ruff: noqa: INP001  # Sphinx reads this file by its path
"""The site: Sphinx and furo over the Markdown pages as they are in the repository.

Build it by scripts/site. The source folder is the repository, so that links between pages are the
same here and where the repository is browsed.
"""

import contextlib
import io
import os
import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from pcrshard import __version__
from pcrshard.cli.main import main as pcrshard_command

project = "pcrshard"
author = "the pcrshard authors"
copyright = "the pcrshard authors"  # noqa: A001  # the name that Sphinx wants
version = release = __version__
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.md",
    "evidence/README.md",
    "evidence/*/README.md",
    *(f"{name}.md" for name in ("SPEC", "CHANGELOG", "CONTRIBUTING", "DECISIONS", "SECURITY")),
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4
smartquotes = False  # messages and commands are searched for as they are
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Code blocks of a page that a test with Ray or DALI runs are called so: ```python ray
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"pcrshard {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#93c5fd", "color-brand-content": "#93c5fd"},
}
if repository := os.environ.get("PCRSHARD_REPOSITORY"):  # adds a link to the source of each page
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": os.environ.get("PCRSHARD_BRANCH", "main"),
        "source_directory": "",
    }

# Files outside the site: links where the repository is browsed, plain text on the site.
_FILES = r"(?:\.\./)*(?:LICENSE|scripts/[^)]*|conf/[^)]*)|(?:\.\./)?README\.md"
_NO_PAGE = re.compile(rf"\[([^\]]+)\]\((?:{_FILES})\)")


def _unlink(_app: Any, _name: str, source: list[str]) -> None:
    source[0] = _NO_PAGE.sub(r"\1", source[0])


def help_text(*command: str) -> str:
    """Return what ``pcrshard COMMAND --help`` prints, 88 columns wide."""
    os.environ["COLUMNS"] = "88"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        pcrshard_command([*command, "--help"])
    return printed.getvalue()


class CommandHelp(Directive):
    """One section per command with its ``--help``; subcommands follow their command."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [section for name in subcommands() for section in self.sections(name)]

    def sections(self, *command: str) -> list[nodes.Node]:
        """Return the section of a command and those of its subcommands."""
        title = " ".join(("pcrshard", *command))
        section = nodes.section(
            ids=[nodes.make_id(title)], names=[nodes.fully_normalize_name(title)]
        )
        text = help_text(*command)
        section += [nodes.title(text=title), nodes.literal_block(text, text, language="text")]
        below = [each for name in subcommands(*command) for each in self.sections(*command, name)]
        return [section, *below]


def subcommands(*command: str) -> list[str]:
    """Return the names of a command's subcommands, in the order of its help."""
    text = help_text(*command)
    usage = text.partition("\n\n")[0]
    return re.findall(r"^ {4}([a-z]+)\b", text, re.MULTILINE) if usage.endswith("...") else []


def _write_llms_txt(app: Any, failed: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): the pages and their titles, as a language model reads them."""
    if failed:
        return
    titles = app.env.titles
    lines = ["# pcrshard", "", f"> {metadata('pcrshard')['Summary']}", "", "## Pages", ""]
    lines += [f"- [{titles[page].astext()}]({page}.html)" for page in sorted(titles)]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def setup(app: Any) -> None:
    """Connect the directive and the link filter to Sphinx."""
    app.add_directive("pcrshard-help", CommandHelp)
    app.connect("source-read", _unlink)
    app.connect("build-finished", _write_llms_txt)
