"""Every block of README.md and docs/ runs; every command is documented."""

import doctest
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
from forked_commands import install
from support import MARKDOWN, ROOT

from pcrshard.cli import main as cli
from pcrshard.errors import MissingDependency

BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages with blocks that run; those that everybody reads always do.
PAGES = [page for page in MARKDOWN if BLOCK.search(page.read_text())]
ALWAYS = ("README.md", "start.md")
EACH = [
    pytest.param(page, marks=[pytest.mark.changed(page)] * (page.name not in ALWAYS), id=page.name)
    for page in PAGES
]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """Processes in which the large imports are done: each would take seconds."""
    context = multiprocessing.get_context("forkserver")
    modules = ["datasets", "torch", "torch._dynamo", "webdataset", "pcrshard.cli.main"]
    context.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
        patch.setenv("PYTHONWARNINGS", "ignore")
        patch.setenv("OMP_NUM_THREADS", "1")  # tests run side by side
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield context.Process


def run_blocks(page, folder):
    """Run the blocks of a page, those of Python each with names of its own."""
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method(None, force=True)  # the default again, as in a shell
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # no worker processes for 24 images
    commands = install(pathlib.Path(folder, ".commands"))
    try:
        for kind, text in BLOCK.findall(page.read_text()):
            print(text, file=sys.stderr, flush=True)
            if kind == "bash":
                subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
            else:
                exec(compile(text, "block", "exec"), {"__name__": "__main__"})
    finally:
        os.kill(commands, signal.SIGKILL)


@pytest.mark.parametrize("page", EACH)
def test_every_block_runs(page, fork, synthetic_folder, tmp_path):
    """A reader can copy any block, in the order of the page, and it works."""
    if page.name != "start.md":  # it makes its own
        shutil.copytree(synthetic_folder, tmp_path / "photos")
    process = fork(target=run_blocks, args=(page, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()


def test_every_command_is_in_the_documentation(capsys):
    """No command is known only to its author."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^ {4}([a-z]+)\b", capsys.readouterr().out, re.MULTILINE)
    assert {"encode", "info", "stage"} <= set(commands)
    text = "".join(page.read_text() for page in PAGES)
    for name in commands:
        assert re.search(rf"(pcrshard |scripts/){name}\b", text), name


MODULES = [
    path
    for path in sorted((ROOT / "pcrshard").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py", "build_native.py")
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_examples_in_docstrings_run(path):
    """Examples in docstrings are true."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    try:
        module = importlib.import_module(name)
    except MissingDependency as error:
        pytest.skip(f"NOT INSTALLED: {error}")
    assert doctest.testmod(module).failed == 0


LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_links_lead_somewhere():
    """Relative links and pictures exist, and a link into a page ends at a heading."""
    found = [(page, *link) for page in MARKDOWN for link in LINK.findall(page.read_text())]
    assert len(found) > 60
    for page, target, anchor in found:
        where = page.parent / target if target else page
        assert where.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(where), f"{page.name}: {target}#{anchor}"
