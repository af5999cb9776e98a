"""The command line: every command does what its help says, and errors are one line."""

import os
import re
import subprocess
import sys

import pytest
from command_line import RUN


def test_round_trip(synthetic_folder, tmp_path, cli):
    """encode, info, verify and export of a folder, one after the other, by commands alone."""
    pcr, out, one = tmp_path / "pcr", tmp_path / "out", ("--workers", 1)
    status, text, _ = cli("encode", synthetic_folder, pcr, "--num-shards", 3, *one)
    assert (status, "samples: 24\nshards: 3\n" in text) == (0, True)
    assert re.search(r"full +\S+ kB +\S+ kB +1 +1 +1\n", text)
    assert "layout: compact" in cli("info", pcr)[1]
    about = cli("info", pcr, "--json")[1]
    assert (about["samples"], about["shards"], about["classes"]) == (24, 3, ["cat", "dog"])
    assert [row["scan"] for row in about["scans"]] == [*range(1, 11), "full"]
    status, text, _ = cli("verify", pcr, "--against", synthetic_folder, *one)
    assert status == 0
    assert text.startswith("samples: 24\nimages: 24\n")
    assert text.endswith(f"shards: 3\nagainst: {synthetic_folder}\nproblems: 0\n")
    status, figures, _ = cli("verify", pcr / "pcr.json", "--json", "--workers", 2)
    assert (status, figures["samples"], figures["problems"]) == (0, 24, [])
    status, text, _ = cli("export", pcr, out, "--scan", 2, "--baseline")
    assert (status, text) == (0, "samples: 24\nleft out: 0\nscan: 2\n")
    assert sum(1 for path in out.rglob("*.jpg")) == 24


@pytest.mark.parametrize("command", [["info"], ["verify"], ["export", "out"]])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("pcr.json", b"{"),
        ("pcr.json", b"[]"),
        ("pcr.json", b'{"format":"pcrshard","version":2}'),
        ("pcr.json", b"\xff\xfe\x00"),
        ("a.tar", b""),
        ("a.tar", b"x" * 2000),
        ("a.tar", bytes(10240)),
    ],
)
def test_a_file_that_is_no_dataset_or_shard(tmp_path, monkeypatch, cli, command, name, data):
    """Commands refuse anything else with a message that names the file, and write nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    status, out, err = cli(command[0], tmp_path / name, *command[1:])
    assert status == 1
    assert name in out + err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "line",
    [
        "encode none out -> none",
        "encode images dataset -> --resume",
        "encode images out --num-shards 100 -> 100",
        "encode images out --name a/b -> a/b",
        "encode images out --layout preview --base 11 -> 11",
        "encode images out --layout preview --base 0 -> got 0",
        "encode images file/out -> file",
        "encode images same -> outside the source",
        "encode images below -> pcr.json",
        "encode pipe:cat out -> got a pipe",
        "info none -> none",
        "encode nosuch://x out -> nosuch",
        *(
            f"encode images out {option} -> got"
            for option in ("--num-shards 0", "--resize-short 0", "--samples-per-shard 0")
        ),
        "info http://127.0.0.1:1/x -> 127.0.0.1:1",
        "cache ls none -> none",
        "plan dataset --latency 10,1 -> median, 0.01",
        "plan dataset --latency 1,nan -> at least 0",
        "plan dataset --ranks 25 -> at most 24 ranks, got 25",
        "verify dataset --against none -> none",
        "fidelity dataset --plot none/plot.png -> plot.png",
        "fidelity dataset --plot plot.nonsense -> nonsense",
        "export dataset out --scan 11 -> 11",
        "export dataset out --scan 11 --on-error skip -> 11",
    ],
)
def test_errors_are_one_line(synthetic_folder, dataset, tmp_path, fails, line):
    """Wrong arguments of every command end with one line on standard error and exit code 1."""
    names = {"images": str(synthetic_folder), "same": f"file://{synthetic_folder}"}
    names |= {"dataset": str(dataset), "none": str(tmp_path / "none"), "out": str(tmp_path / "out")}
    names |= {"below": f"{dataset}/pcr.json/out", "file/out": f"{tmp_path}/file/out"}
    (tmp_path / "file").write_bytes(b"")
    command, _, words = line.partition(" -> ")
    fails(*(names.get(word, word) for word in command.split()), words=words.split(", "))


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
