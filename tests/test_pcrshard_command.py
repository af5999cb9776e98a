"""The installed command at a Ctrl-C: one line whenever it comes, whole files, and a way on."""

import os
import random
import select
import signal
import subprocess
import sys
import time

import pytest
from support import read_all, run_python, write_files

from pcrshard.testing import make_jpeg

# As the installed script, but for a byte that says when it begins: what Python does before it, with
# a traceback, is not ours.
PROGRAM = "import os, sys; from pcrshard_command import main; os.write(1, b'.'); sys.exit(main())"
# The same around a command that does nothing, with a Ctrl-C before the line of that number.
TRACED = """
import signal, sys, types
import pcrshard_command

before = int(sys.argv[1])
sys.modules["pcrshard.cli.main"] = types.SimpleNamespace(main=lambda: 7)
lines = iter(range(10_000))

def trace(frame, event, _):
    is_here = frame.f_code.co_filename in (pcrshard_command.__file__, signal.__file__)
    if is_here and event == "line" and next(lines) == before:
        signal.raise_signal(signal.SIGINT)
    return trace

sys.settrace(trace)
status = pcrshard_command.main()
sys.settrace(None)
print(next(lines))
sys.exit(status)
"""
ADVICE = "; the same command with --resume continues from here"
MOMENTS = [pytest.param(1), pytest.param(60, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Images that take half a second to encode."""
    files = {f"{number:02d}.jpg": make_jpeg(number, 450, 550, quality=85) for number in range(10)}
    return write_files(tmp_path_factory.mktemp("pictures"), files)


@pytest.fixture(scope="module")
def encoded(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded") / "pcr"
    assert run(words("encode", pictures, folder)) == (0, "")
    return folder


def words(command, source, target):
    """The command line of each of the commands that are stopped here."""
    options = {
        "encode": [target, "--num-shards=8", "--workers=2"],
        "stage": [target, "--scan=5"],
        "verify": ["--workers=2"],
    }
    return [command, str(source), *map(str, options[command])]


def start(arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert select.select([process.stdout], [], [], 60)[0]
    return process


def without_plan(said):
    """What a command says without the line in which `encode` says what it will do."""
    return "".join(line for line in said.splitlines(True) if not line.startswith("writing "))


def run(arguments):
    """Exit status and error output of a command that nobody stops."""
    with start(arguments) as process:
        _, said = process.communicate(timeout=300)
    return process.returncode, without_plan(said)


def stop(arguments, seconds):
    """The same of one whose terminal sends a Ctrl-C after some seconds."""
    with start(arguments) as process:
        time.sleep(seconds)
        # A process that has ended and was not waited for takes a signal, too.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=300)
    return process.returncode, without_plan(said)


def check_stopped(command, status, said):
    """One line, or none where all was done; only Python's very end, without signals, ends so."""
    # Before it begins, there is nothing to resume.
    advice = ADVICE if command == "encode" else ""
    lines = {"pcrshard: stopped\n", f"pcrshard {command}: stopped\n"}
    lines.add(f"pcrshard {command}: stopped{advice}\n")
    assert (status, said) in {(0, ""), (-signal.SIGINT, ""), *((130, line) for line in lines)}


def test_ctrl_c_before_each_line():
    """No line of the entry is without a handler: one that changes handlers can be cut short."""

    def traced(before):
        command = [sys.executable, "-c", TRACED, str(before)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    whole = traced(-1)
    assert (whole.returncode, whole.stderr) == (7, "")
    # The first two make the handler and enter the block that takes a Ctrl-C.
    num_lines = int(whole.stdout)
    ends = [traced(before) for before in range(2, num_lines)]
    for end in ends:
        assert (end.returncode, end.stderr) in {(130, "pcrshard: stopped\n"), (7, "")}
    assert {end.returncode for end in ends} == {7, 130}


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("command", ["encode", "stage", "verify"])
def test_ctrl_c_at_any_moment(command, moments, pictures, encoded, tmp_path):
    """It is one line and 130; what is written is whole; and the next run finishes the work."""
    source = pictures if command == "encode" else encoded
    begin = time.monotonic()
    assert run(words(command, source, tmp_path / "whole")) == (0, "")
    longest = time.monotonic() - begin
    expected = read_all(tmp_path / "whole") if command != "verify" else {}
    for number in range(moments):
        target = tmp_path / str(number)
        arguments = words(command, source, target)
        seconds = random.Random(number).uniform(0, longest)
        check_stopped(command, *stop(arguments, seconds))
        if command == "verify":
            continue
        found = read_all(target) if target.exists() else {}
        shards = {name: what for name, what in found.items() if name.endswith(".tar")}
        assert shards.items() <= expected.items()
        resume = ["--resume"] if command == "encode" and found else []
        assert run([*arguments, *resume]) == (0, "")
        assert read_all(target) == expected


def test_python_dash_m_is_the_command():
    """``python -m pcrshard`` does what ``pcrshard`` does."""
    assert run_python("-m", "pcrshard", "--version").startswith("pcrshard")
