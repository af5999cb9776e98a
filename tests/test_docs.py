"""Every block of README.md and docs/ runs; every command is documented."""

import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

from pcrshard.cli import main as cli

PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "guide",
            "native",
            "plan",
            "remote",
            "training",
            "activations",
            "huggingface",
            "scripts",
            "slurm",
        )
    ),
]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page, synthetic_folder, tmp_path):
    """A reader can copy any block, in the order of the page, and it works."""
    shutil.copytree(synthetic_folder, tmp_path / "photos")
    environment = os.environ | {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",  # tests run side by side
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for kind, text in blocks:
        command = (
            ["bash", "-euo", "pipefail", "-c", text]
            if kind == "bash"
            else [sys.executable, "-c", text]
        )
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{text}\n{result.stderr}"


def test_every_command_is_in_the_documentation():
    """No command is known only to its author."""
    text = "".join(page.read_text() for page in PAGES)
    commands = re.findall(r"\{([a-z,]+)\}", cli._parser().format_usage()) or [
        ",".join(cli._parser()._subparsers._group_actions[0].choices)
    ]
    for name in commands[0].split(","):
        assert re.search(rf"(pcrshard|scripts/){'' if name == 'demo' else ' '}{name}", text), name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pcrshard").rglob("*.py")), ids=lambda path: path.name
)
def test_examples_in_docstrings_run(path):
    """Examples in docstrings are true."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if name.endswith(("__init__", "_core", "build_native")):
        return
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_links_lead_somewhere():
    """Relative links and pictures exist."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_changelog_names_this_version_or_unreleased():
    """A release is described."""
    from pcrshard import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {__version__}" in text or "## Unreleased" in text
