"""Progress: a bar on a terminal, plain lines in a log, silence in short runs."""

import errno
import os
import pty
import re
import select
import subprocess
import termios
import time

import pytest
from command_line import RUN, run

from pcrshard.cli.progress import ProgressBar, human_rate, human_seconds


def test_log_lines_without_a_terminal(capsys):
    """In a log file, progress is plain lines with count, rate and time left, no control codes."""
    with ProgressBar("encode", "images", log_seconds=-1) as progress:
        for done in (8, 16, 24):
            progress(done, 24)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(
        re.fullmatch(r"encode: \d+/24 images, [\d.e+]+ images/s, \S+ .*left", line)
        for line in lines
    )


def test_quiet_without_a_terminal(synthetic_folder, tmp_path):
    """A short run says nothing on standard error."""
    result = run("encode", synthetic_folder, tmp_path, "--num-shards", "3", "--workers", "1")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_bar_on_a_terminal(synthetic_folder, tmp_path):
    """On a terminal, a bar shows images done, images/s and time left."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))  # a fresh one has no width, and tqdm then shows nothing
    command = [
        *RUN,
        "encode",
        str(synthetic_folder),
        str(tmp_path),
        "--num-shards",
        "6",
        "--workers",
        "1",
    ]
    with subprocess.Popen(
        command,
        stdin=child,
        stdout=subprocess.DEVNULL,
        stderr=child,
        env=os.environ | {"COLUMNS": "100"},
    ) as process:
        os.close(child)
        text, end = b"", time.monotonic() + 30
        while time.monotonic() < end and select.select([parent], [], [], 10)[0]:
            try:
                part = os.read(parent, 4096)
            except OSError as error:
                assert error.errno == errno.EIO  # Linux's end of a terminal
                break
            if not part:
                break
            text += part
    os.close(parent)
    assert process.returncode == 0
    shown = text.decode()
    assert "\r" in shown
    assert "24/24" in shown
    assert "images/s" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (3570, "1 h 0 min"), (86400, "24 h 0 min")],
)
def test_human_seconds(seconds, text):
    """Durations are short and never show sixty of a unit."""
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(5000.4, "5000"), (12.6, "13"), (1.26, "1.3"), (0.0185, "0.018")]
)
def test_slow_work_is_not_zero_a_second(rate, text):
    """Who waits minutes for an image sees that something happens."""
    assert human_rate(rate) == text
