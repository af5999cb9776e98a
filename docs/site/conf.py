# ruff: noqa: INP001  # Sphinx reads this file by its path
"""The site: Sphinx and furo over the Markdown pages as they are in the repository.

Build it by scripts/site. The source folder is the repository, so that links between pages are the
same here and where the repository is browsed.
"""

import re
from typing import Any

from pcrshard import __version__

project = "pcrshard"
author = "the pcrshard authors"
copyright = "the pcrshard authors"  # noqa: A001  # the name that Sphinx wants
version = release = __version__
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "evidence/**/README.md",
    *(f"{name}.md" for name in ("SPEC", "CHANGELOG", "CONTRIBUTING", "DECISIONS", "SECURITY")),
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
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

# Files that are no pages: shown where the repository is browsed, text on the site.
_FILES = r"(?:\.\./)*(?:LICENSE|scripts/[^)]*|conf/[^)]*)|(?:\.\./)?README\.md"
_NO_PAGE = re.compile(rf"\[([^\]]+)\]\((?:{_FILES})\)")


def _unlink(_app: Any, _name: str, source: list[str]) -> None:
    source[0] = _NO_PAGE.sub(r"\1", source[0])


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", _unlink)
