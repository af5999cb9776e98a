"""The documentation site: what is in it, where its links lead, and that it can be built."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support import MARKDOWN, ROOT

import pcrshard

PAGES = {path: path.read_text() for path in MARKDOWN}
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCES = "".join(
    path.read_text() for ending in ("py", "c") for path in (ROOT / "pcrshard").rglob(f"*.{ending}")
)
PYTHON = os.environ.get("PCRSHARD_PYTHON", sys.executable)


def nav():
    """The pages in the order of the site's navigation."""
    home = ROOT / "docs" / "index.md"
    entries = [
        line
        for body in TOCTREE.findall(PAGES[home])
        for line in body.splitlines()
        if line and not line.startswith(":")
    ]
    return [(home.parent / f"{entry}.md").resolve() for entry in entries]


def test_every_page_is_in_the_navigation_once():
    """A page that no menu leads to is not read."""
    pages = nav()
    assert len(set(pages)) == len(pages)
    outside = {ROOT / "README.md", ROOT / "docs" / "index.md"}
    assert set(pages) == set(PAGES) - outside


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    """Who searches for a message finds it, in the words of today."""
    text = PAGES[ROOT / "docs" / "troubleshooting.md"]
    messages = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert len(messages) > 15
    # Literals that go on in the next line are one.
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    for message in messages:
        assert message in joined, message


def test_every_public_name_is_in_the_reference():
    """The reference is complete."""
    text = "".join(PAGES[path] for path in PAGES if path.parent.name == "api")
    for name in set(pcrshard.__all__) - {"PCRError", "__version__"}:
        assert re.search(rf":: pcrshard\.{name}$", text, re.MULTILINE), name


@pytest.mark.long
def test_the_site_is_built(tmp_path):
    """No warning, no broken reference, and nothing from another server."""
    probe = subprocess.run(
        [PYTHON, "-c", "import furo, myst_parser, sphinx_copybutton, sphinx_design"], check=False
    )
    if probe.returncode:
        pytest.skip("SPHINX AND FURO ARE NOT INSTALLED: scripts/setup installs them")
    copy = tmp_path / "copy"
    for name in ("docs", "evidence", "scripts", "pcrshard"):
        shutil.copytree(ROOT / name, copy / name)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, copy)
    environment = os.environ | {"PCRSHARD_PYTHON": PYTHON, "PYTHONPATH": str(copy)}
    result = subprocess.run(
        [copy / "scripts" / "site"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-1000:]
    assert "pcrshard.PCRDataset" in (copy / "site" / "docs" / "api" / "training.html").read_text()
    assert "(docs/training.html)" in (copy / "site" / "llms.txt").read_text()
    assert "pcrshard checkpoint pull" in (copy / "site" / "docs" / "cli.html").read_text()


def test_the_newcomers_page_is_the_one_that_was_timed():
    """Each step of the figures is a section of docs/start.md."""
    sections = re.findall(r"^## (\d\. .+)$", PAGES[ROOT / "docs" / "start.md"], re.MULTILINE)
    for name in ("clone", "wheel"):
        report = json.loads((ROOT / "evidence" / "newcomer" / f"{name}.json").read_text())
        steps = [row["step"] for row in report["results"]["steps"]]
        assert steps == sections[: len(steps)]
