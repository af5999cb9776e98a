"""Progress: a bar on a terminal, plain lines in a log, silence in short runs."""

import os
import pty
import re
import subprocess
import termios
import time

from command_line import RUN

from pcrshard.cli.progress import ProgressBar


def test_log_lines_without_a_terminal(capsys):
    """In a log file, progress is whole lines with count, rate and time left."""
    with ProgressBar("encode", "images", log_seconds=0.01) as progress:
        for done in (8, 16, 24):
            time.sleep(0.02)
            progress(done, 24)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 3
    assert all(
        re.fullmatch(r"encode: \d+/24 images, [\d.?]+ ?images/s, \S+ left", line) for line in lines
    )


def test_a_bar_on_a_terminal(synthetic_folder, tmp_path):
    """On a terminal, a bar shows images done, images/s and time left."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))  # a fresh one has no width, and tqdm then shows nothing
    command = [*RUN, "encode", synthetic_folder, tmp_path, "--num-shards", "6", "--workers", "1"]
    subprocess.run(command, stdin=child, stdout=subprocess.DEVNULL, stderr=child, check=True)
    os.close(child)
    # A terminal holds at least 4 kB of unread output.
    shown = os.read(parent, 4096).decode()
    os.close(parent)
    assert "\r" in shown
    assert "24/24" in shown
    assert "images/s" in shown
