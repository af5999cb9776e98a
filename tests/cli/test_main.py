"""The command line: every command does what its help says, and errors are one line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from command_line import RUN
from support import wait_for

from pcrshard import open_dataset
from pcrshard.cli.main import main


def test_round_trip(synthetic_folder, tmp_path, capsys):
    """encode, info, verify and export of a folder, one after the other, by commands alone."""
    pcr, out = tmp_path / "pcr", tmp_path / "out"
    assert (
        main(["encode", str(synthetic_folder), str(pcr), "--num-shards", "3", "--workers", "1"])
        == 0
    )
    text = capsys.readouterr().out
    assert "24 samples in 3 shards" in text
    assert re.search(r"full +\S+ kB +\S+ +\S+ +1\n", text)

    assert main(["info", str(pcr)]) == 0
    assert "layout: compact" in capsys.readouterr().out

    assert main(["info", str(pcr), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    index, _ = open_dataset(str(pcr))
    assert (about["samples"], about["shards"], about["classes"]) == (24, 3, ["cat", "dog"])
    assert [s["prefix_bytes"] for s in about["scans"]] == [
        index.prefix_bytes(s) for s in (*range(1, 11), "full")
    ]

    assert main(["verify", str(pcr), "--against", str(synthetic_folder), "--workers", "1"]) == 0
    assert "pixels equal" in capsys.readouterr().out
    assert main(["verify", str(pcr / "pcr.json"), "--json", "--workers", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == {"samples": 24, "shards": 3, "problems": []}

    assert main(["export", str(pcr), str(out), "--scan", "2", "--baseline"]) == 0
    assert "24 samples at scan 2" in capsys.readouterr().out
    assert sum(1 for path in out.rglob("*.jpg")) == 24


NOT_A_DATASET = [
    ("nothing there", None),
    ("not JSON", b"{"),
    ("another JSON", b"{}"),
    ("an array", b"[]"),
    (
        "no shards",
        (
            b'{"format":"pcrshard","version":1,"script":"standard",'
            b'"num_groups":10,"num_samples":0,"shards":[]}'
        ),
    ),
    ("a newer version", b'{"format":"pcrshard","version":2}'),
    ("binary", b"\xff\xfe\x00"),
]


@pytest.mark.parametrize("command", ["info", "verify", "export"])
@pytest.mark.parametrize(("name", "data"), NOT_A_DATASET, ids=[name for name, _ in NOT_A_DATASET])
def test_not_a_dataset(tmp_path, fails, command, name, data):
    """Anything that is not a dataset is one line that names it."""
    if data is not None:
        (tmp_path / "pcr.json").write_bytes(data)
    fails(
        command,
        tmp_path,
        *([tmp_path / "out"] if command == "export" else []),
        words=[str(tmp_path)],
    )


@pytest.mark.parametrize("command", ["info", "export"])
@pytest.mark.parametrize("data", [b"", b"x" * 2000, bytes(10240)])
def test_not_a_shard(tmp_path, fails, command, data):
    """The same for a file that is not a shard."""
    (tmp_path / "a.tar").write_bytes(data)
    fails(
        command,
        tmp_path / "a.tar",
        *([tmp_path / "out"] if command == "export" else []),
        words=["a.tar"],
    )


def test_errors_are_one_line(synthetic_folder, dataset, tmp_path, fails):
    """Wrong arguments of every command end with one line on standard error and exit code 1."""
    folder, data = str(synthetic_folder), str(dataset)
    fails("encode", tmp_path / "none", tmp_path / "out", words=["none"])
    fails("encode", folder, data, words=["--resume"])
    fails("encode", folder, tmp_path / "out", "--num-shards", "100", words=["100"])
    fails("encode", folder, tmp_path / "out", "--name", "a/b", words=["a/b"])
    fails("encode", folder, tmp_path / "out", "--layout", "preview", "--base", "11", words=["11"])
    fails("encode", folder, tmp_path / "out", "--layout", "preview", "--base", "0", words=["got 0"])
    fails("encode", folder, tmp_path / "out", "--base", "3", words=["--layout preview"])
    fails("encode", folder, f"file://{folder}", words=["outside the source"])
    fails("info", "http://127.0.0.1:1/x", words=["127.0.0.1:1"])
    fails("encode", folder, tmp_path / "out", "--preview-fields", "cls", words=["--layout preview"])
    fails("encode", data, tmp_path / "out", words=["PCR shards", "pcrshard export"])
    fails("encode", "pipe:cat x.tar", tmp_path / "out", words=["got a pipe"])
    fails("encode", "nosuch://x", tmp_path / "out", words=["nosuch"])
    fails("plan", data, "--latency", "10,1", words=["median", "0.01"])
    fails("plan", data, "--latency", "1,nan", words=["at least 0"])
    fails("plan", data, "--ranks", "25", words=["at most 24 ranks", "got 25"])
    fails("verify", data, "--against", tmp_path / "none", words=["none"])
    fails("export", data, tmp_path / "out", "--scan", "11", words=["11"])


def test_a_reader_that_stops_early(dataset):
    """``pcrshard info ... | head -1`` ends without a traceback."""
    command = [sys.executable, "-u", *RUN[1:], "info", str(dataset)]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(dataset, closed):
    """A job's environment may close standard output or error: the command still runs."""
    program = f'exec "$@" {closed}'
    command = ["sh", "-c", program, "sh", *RUN, "plan", str(dataset), "--batch", "1", "--scan", "5"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert bool(result.stdout) == (closed == "2>&-")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="THERE IS NO /dev/full")
def test_a_full_disk_under_the_report(dataset):
    """``pcrshard info ... > FILE`` on a full disk is one line, and no success."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*RUN, "info", str(dataset)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("pcrshard info: ")
    assert "No space left" in line


def test_an_interrupt_is_one_line(tmp_path):
    """Ctrl-C ends with one line and the shell's exit code for it."""
    listed = tmp_path / "list.tsv"
    os.mkfifo(listed)
    # Without -W error: the file whose opening was interrupted is left to the garbage collector.
    command = [RUN[0], *RUN[3:], "encode", str(listed), str(tmp_path / "out")]
    opened = []

    def is_reading():
        with contextlib.suppress(OSError):  # ENXIO: nobody reads yet
            opened.append(os.open(listed, os.O_WRONLY | os.O_NONBLOCK))
        return opened

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(is_reading)
        # Python itself loses an interrupt that comes while it opens a pipe: it asks where in the
        # file it is, and takes any exception for a no.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()  # otherwise a failure would hang
    os.close(opened[0])
    assert process.returncode == 130
    assert err == "pcrshard encode: stopped; the same command with --resume goes on from here\n"
