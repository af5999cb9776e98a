"""The parser: every command line ends with a line and an exit status."""

import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcrshard import DeltaStore, PrefixCache, Shard, __version__
from pcrshard.cli.main import build_parser, main


def leaves(parser, words=()):
    """(words, parser) of each command."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                yield from leaves(command, (*words, name))
            return
    yield words, parser


COMMANDS = dict(leaves(build_parser()))
NAMES = [" ".join(words) for words in COMMANDS]


def test_these_are_the_commands():
    """Jobs and notebooks rely on the names."""
    datasets = "encode index info verify check export stage plan cache fidelity card demo"
    checkpoint = "ls show verify export recover delete pull"
    assert [
        *datasets.split(),
        *(f"checkpoint {name}" for name in checkpoint.split()),
    ] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_every_option_and_has_an_example(cli, name):
    """The example can be copied, and a mistyped option shows the usage of its own command."""
    status, text, _ = cli(*name.split(), "--help")
    assert status == 0
    assert "==SUPPRESS==" not in text
    (line,) = re.findall(rf"Example:\n    pcrshard ({name} .*)", text)
    build_parser().parse_args(line.split())
    options = [action for action in COMMANDS[tuple(name.split())]._actions if action.dest != "help"]
    assert all(option.help.strip() for option in options)
    assert "json" in {option.dest for option in options}
    assert not any(re.search(r"\b[a-z]+_[a-z_]+\b", option.help) for option in options)
    status, _, err = cli(*line.split(), "--no-such-option", "5")
    assert status == 2
    assert err.startswith(f"usage: pcrshard {name} ")
    assert f"pcrshard {name}: error: unrecognized arguments: --no-such-option 5\n" in err


def test_datasets_and_stores_are_read_with_storage_options():
    """Every command that takes a URL takes the options of its file system."""
    local = {"cache", "demo"}
    for words, parser in COMMANDS.items():
        has_options = "storage_option" in {action.dest for action in parser._actions}
        assert has_options != (words[0] in local), words


@pytest.mark.parametrize(
    ("word", "value"),
    [("false", False), ("False", False), ("eu-1", "eu-1"), ('{"a": 1}', {"a": 1})],
)
def test_values_of_storage_options(word, value):
    """A value is JSON, a word, or a truth value as Python writes it."""
    args = build_parser().parse_args(["info", "a", "--storage-option", f"k={word}"])
    assert args.storage_option == [("k", value)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("encode a b --part 1", "of length 2, got ['1']"),
        ("encode a b --workers 0", "got '0'"),
        ("encode a b --slurm-option partition", "'partition'"),
        ("encode a b --preview-fields cls", "--layout preview"),
        ("encode a b --base 5", "--layout preview"),
        ("encode a b --engine dask", "dask worker ADDRESS"),
        ("encode a b --engine dask --scheduler tcp://x:1 --workers 3", "has its own workers"),
        ("encode a b --scheduler tcp://x:1", "--scheduler: needed by --engine dask and by no"),
        ("encode a b --engine dask --slurm-option a=b", "--slurm-option: needs --engine slurm"),
        ("encode a.jpg b.jpg c.jpg shards", "c.jpg shards; quote a pattern"),
        ("export a b --scan 0", "expected `int` >= 1, got '0'"),
        ("fidelity a --model-size 1000000", "expected `int` <= 4096, got '1000000'"),
        ("plan a --ranks 0", "expected `int` >= 1, got '0'"),
        ("plan a --workers nan", "expected `int`, got 'nan'"),
        ("plan a --bandwidth -3", "expected `float` > 0.0, got '-3'"),
        ("plan a --bandwidth fast", "expected `float`, got 'fast'"),
        ("plan a --latency ten", "invalid latency value: 'ten'"),
        ("plan a --latency 1,2,3", "invalid latency value: '1,2,3'"),
        ("plan a --simulate 9 --threads 1000000000", "got '1000000000'"),
        ("checkpoint delete a", "--keep --keep-every --keep-last is required"),
        ("checkpoint delete a --keep-every -1", "got '-1'"),
        ("checkpoint pull a b --keyframe-every 0", "unrecognized"),
        ("info", "expected a dataset or a shard"),
        ("", "COMMAND"),
        ("checkpoint", "ACTION"),
        ("nonsense", "invalid choice: 'nonsense'"),
    ],
)
def test_wrong_usage_says_what_was_expected(cli, line, expected):
    """Exit status 2, the usage, and one line that names the bound and the value."""
    status, out, err = cli(*line.split())
    assert (status, out) == (2, "")
    assert err.startswith("usage: pcrshard ")
    assert expected in err.splitlines()[-1]


def test_version(cli):
    """--version prints the version."""
    assert cli("--version") == (0, f"pcrshard {__version__}\n", "")


WORDS = "0 -1 1 5 0.5 11 full nan inf 1e999 1/2 a=1 = x { [1] %s%n none a,b q95"
PLACES = (
    "dataset dataset/pcr.json dataset/data-000000.tar store cache images empty missing broken.tar "
    "http://127.0.0.1:1/x http://[::1 nosuch://x pipe:false"
)
HOSTILE = ["", "9" * 30, "a\x00b", "\udcff", "\x1b[31m", *WORDS.split(), *PLACES.split()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, dataset, synthetic_folder):
    """A folder with one of everything; command lines may change it."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(dataset, folder / "dataset")
    shutil.copytree(synthetic_folder, folder / "images")
    (folder / "empty").mkdir()
    (folder / "broken.tar").write_bytes(b"x" * 2000)
    with DeltaStore(folder / "store") as store:
        for value in range(3):
            store.save({"weight": torch.full((4, 4), float(value))})
    shard = folder / "dataset" / "data-000000.tar"
    Shard(shard, cache=PrefixCache(str(folder / "cache"))).load(2)
    return folder


def value_of(draw, action):
    """The words that follow an option, or those of an argument."""
    if action.nargs == 0:
        return []
    # These engines, and the demonstration's own pictures, take longer than a test may.
    known = [word for word in action.choices or () if word not in ("dask", "slurm")]
    words = st.sampled_from([*known, *HOSTILE])
    count = draw(st.integers(1, 2)) if action.nargs in ("+", "*") else 1
    return draw(st.lists(words, min_size=count, max_size=count))


@st.composite
def command_lines(draw):
    """Any command with any of its options, and values that may fit, or not."""
    words = draw(st.sampled_from(list(COMMANDS)))
    actions = [action for action in COMMANDS[words]._actions if action.dest != "help"]
    line = list(words)
    for action in actions:
        # Worker processes take a second to start.
        if action.dest == "workers":
            line += ["--workers", draw(st.sampled_from(["1", "0", "-1", "x"]))]
        elif not action.option_strings:
            line += value_of(draw, action)
        elif action.required or draw(st.integers(0, 5)) == 0:
            line += [action.option_strings[0], *value_of(draw, action)]
    return line


@settings(max_examples=60)
@given(line=command_lines())
@example(line=["checkpoint", "recover", "store"])
@example(line=["plan", "dataset", "--link", "5"])
@example(line=["plan", "dataset", "--simulate", "1000", "--threads", "4096"])
@example(line=["plan", "dataset", "--ranks", "24", "--lanes-per-rank", "4096"])
def test_any_command_line_ends_with_a_line_and_a_status(line, workplace):
    """No combination of options and values ends in a traceback."""
    here = os.getcwd()
    os.chdir(workplace)
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(line)
    except SystemExit as end:
        status = end.code
    finally:
        os.chdir(here)
    assert status in (0, 1, 2)
    assert (out.getvalue() if status == 0 else out.getvalue() + err.getvalue()).strip()
    assert "Traceback" not in err.getvalue()


@pytest.mark.parametrize("missing", ["torch", "matplotlib", "cv2", "sklearn"])
def test_a_missing_package_is_named_before_work_starts(missing, tmp_path):
    """A wheel without its extras: one line that says what to install, and nothing is written."""
    lines = {
        "torch": [["demo"], ["checkpoint", "verify", "x"]],
        "matplotlib": [["fidelity", "x", "--plot", "a.png"]],
        "cv2": [["fidelity", "x"]],
        "sklearn": [["demo"]],
    }
    for line in lines[missing]:
        program = (
            f"import sys; sys.modules[{missing!r}] = None;"
            "from pcrshard.cli.main import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, *line]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (text,) = done.stderr.splitlines()
        assert "pip install 'pcrshard[" in text
        assert not list(tmp_path.iterdir())
