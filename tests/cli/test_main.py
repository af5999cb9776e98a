"""The command line: every command does what its help says, and errors are one line."""

import contextlib
import errno
import io
import json
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time

import pytest

from pcrshard import ShardWriter, __version__, open_dataset
from pcrshard.cli import progress
from pcrshard.cli.main import build_parser, main
from pcrshard.cli.progress import human_seconds
from pcrshard.testing import make_jpeg

COMMANDS = ["encode", "info", "verify", "export", "demo"]
RUN = [
    sys.executable,
    "-W",
    "error",
    "-c",
    "import sys; from pcrshard.cli.main import main; sys.exit(main(sys.argv[1:]))",
]


def run(*args, **options):
    command = [*RUN, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def check_one_line(status, err, *words):
    assert status == 1
    assert err.count("\n") == 1, err
    assert err.startswith("pcrshard ")
    assert all(word in err for word in words), err


@pytest.fixture
def fails(capsys):
    """Run a command that must fail in one line with these words, without a traceback."""

    def check(*args, words=()):
        status = main([str(arg) for arg in args])
        check_one_line(status, capsys.readouterr().err, args[0], *words)

    return check


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command, capsys):
    """Each command's help shows a line that can be copied, whose options exist."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    (example,) = re.findall(rf"example:\n  pcrshard ({command} .*)", text)
    build_parser().parse_args(example.split())
    assert "==SUPPRESS==" not in text


def test_version_and_usage(capsys):
    """--version tells the version; wrong usage exits with 2."""
    wrong = (
        [],
        ["encode"],
        ["nonsense"],
        ["export", "a", "b", "--scan", "x"],
        ["encode", "a", "b", "--keep-order", "--seed", "1"],
    )
    for args, code in ((["--version"], 0), *((args, 2) for args in wrong)):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == code
    captured = capsys.readouterr()
    assert __version__ in captured.out
    assert "_scan" not in captured.err


def test_round_trip(synthetic_folder, tmp_path, capsys):
    """encode, info, verify and export of a folder, one after the other, by the command line alone."""
    pcr, out, plot = (tmp_path / name for name in ("pcr", "out", "plot.png"))
    assert (
        main(["encode", str(synthetic_folder), str(pcr), "--num-shards", "3", "--workers", "1"])
        == 0
    )
    text = capsys.readouterr().out
    assert "24 samples in 3 shards" in text
    assert re.search(r"full +\S+ kB +\S+ +\S+ +1\.00x", text)

    assert main(["info", str(pcr), "--plot", str(plot)]) == 0
    assert "layout: compact" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")

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


def test_one_shard_is_a_dataset(shard_urls, capsys):
    """info and verify take a single shard, too."""
    assert main(["info", shard_urls[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 6
    assert main(["verify", shard_urls[0]]) == 0


def test_system(capsys):
    """info --system tells what a bug report needs."""
    assert main(["info", "--system"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {"pcrshard", "native core", "scattered reads", "numpy"} <= about.keys()


def test_verify_finds_and_exits_with_1(dataset, tmp_path, capsys):
    """Problems are printed to standard output, counted, and told by the exit code."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data-000001.tar"
    path.write_bytes(path.read_bytes()[:-5000])
    assert main(["verify", str(tmp_path), "--workers", "1"]) == 1
    text = capsys.readouterr().out
    assert "data-000001.tar" in text
    assert "1 problems in 24 samples" in text


def test_skipped_images_are_told(tmp_path, capsys):
    """--on-error skip ends with how many were skipped, where they are listed, and the first of them."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(make_jpeg())
    (tmp_path / "src" / "b.jpg").write_bytes(b"bad")
    assert main(["encode", str(tmp_path / "src"), str(tmp_path / "dst"), "--on-error", "skip"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"1 images were skipped.*skipped\.jsonl.*b\.jpg", text)


def test_files_left_out_are_told(tmp_path, capsys):
    """Files beside the images are not encoded, and the user is told so."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(make_jpeg())
    (tmp_path / "src" / "README.md").write_text("x")
    assert main(["encode", str(tmp_path / "src"), str(tmp_path / "dst")]) == 0
    captured = capsys.readouterr()
    assert "README.md" in captured.out + captured.err


def test_a_skipped_file_whose_name_is_not_utf8(tmp_path):
    """A name from another locale is printed somehow, never a UnicodeEncodeError at the end of a long run."""
    os.makedirs(tmp_path / "src")
    for name, data in ((b"bad-\xff.jpg", b"bad"), (b"good.jpg", make_jpeg())):
        with open(os.path.join(os.fsencode(tmp_path), b"src", name), "wb") as file:
            file.write(data)
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    result = run("encode", tmp_path / "src", tmp_path / "dst", "--on-error", "skip", env=env)
    assert (result.returncode, result.stderr) == (0, "")


NOT_A_DATASET = [
    ("nothing there", None),
    ("not JSON", b"{"),
    ("another JSON", b"{}"),
    ("an array", b"[]"),
    (
        "no shards",
        b'{"format":"pcrshard","version":1,"script":"standard","num_groups":10,"num_samples":0,"shards":[]}',
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
    fails("info")
    fails("encode", tmp_path / "none", tmp_path / "out", words=["none"])
    fails("encode", folder, data, words=["--resume"])
    fails("encode", folder, tmp_path / "out", "--num-shards", "100", words=["100"])
    fails("encode", folder, tmp_path / "out", "--name", "a/b", words=["a/b"])
    fails("encode", folder, tmp_path / "out", "--layout", "preview", "--base", "11", words=["11"])
    fails("encode", folder, tmp_path / "out", "--layout", "preview", "--base", "0", words=["got 0"])
    fails("encode", folder, tmp_path / "out", "--base", "3", words=["--layout preview"])
    fails("encode", folder, f"file://{folder}", words=["apart from the source"])
    fails("info", "http://127.0.0.1:1/x", words=["cannot read", "127.0.0.1:1"])
    fails("encode", folder, tmp_path / "out", "--preview-fields", "cls", words=["--layout preview"])
    fails("encode", data, tmp_path / "out", words=["PCR shards", "pcrshard export"])
    fails("encode", "pipe:cat x.tar", tmp_path / "out", words=["got a pipe"])
    fails("encode", "nosuch://x", tmp_path / "out", words=["nosuch"])
    fails("plan", data, "--batch", "100000", "--ranks", "2", words=["100000 x 2", "--batch"])
    fails("verify", data, "--against", tmp_path / "none", words=["none"])
    fails("export", data, tmp_path / "out", "--scan", "11", words=["11"])


@pytest.mark.parametrize(
    "option",
    [
        ("--num-shards", "0"),
        ("--resize-short", "0"),
        ("--workers", "0"),
        ("--workers", "-1"),
        ("--samples-per-shard", "0"),
    ],
)
def test_zero_is_not_taken_for_the_default(synthetic_folder, tmp_path, fails, option):
    """A count of zero is refused, not silently something else."""
    fails("encode", synthetic_folder, tmp_path / "out", *option)


@pytest.mark.parametrize("target", ["none/plot.png", "plot.nonsense"])
def test_a_plot_that_cannot_be_saved(dataset, tmp_path, fails, target):
    """A picture that cannot be written is one line."""
    fails("info", dataset, "--plot", tmp_path / target, words=["plot"])


def test_an_unwritable_destination(synthetic_folder, tmp_path, fails):
    """So is a destination below a file."""
    (tmp_path / "file").write_bytes(b"")
    fails("encode", synthetic_folder, tmp_path / "file" / "out", words=["file"])


def test_a_full_disk(synthetic_folder, tmp_path):
    """So is a disk that fills up in the middle of a shard, and --resume goes on from there."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
    command = [
        *RUN[:4],
        limit + RUN[4],
        "encode",
        str(synthetic_folder),
        str(tmp_path),
        "--num-shards",
        "2",
        "--workers",
        "1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    check_one_line(result.returncode, result.stderr, "data-000000.tar")
    assert not list(tmp_path.glob("*.tar"))
    assert (
        main(
            [
                "encode",
                str(synthetic_folder),
                str(tmp_path),
                "--num-shards",
                "2",
                "--workers",
                "1",
                "--resume",
            ]
        )
        == 0
    )


def test_an_error_in_a_worker_is_one_line(tmp_path):
    """An error that crossed a process boundary shows no traceback of the worker."""
    (tmp_path / "src").mkdir()
    for i in range(4):
        (tmp_path / "src" / f"{i}.jpg").write_bytes(make_jpeg()[: 200 if i == 2 else None])
    result = run(
        "encode", tmp_path / "src", tmp_path / "dst", "--num-shards", "4", "--workers", "2"
    )
    check_one_line(result.returncode, result.stderr, "2.jpg", "--on-error skip")


def test_a_reader_that_stops_early(dataset):
    """``pcrshard info ... | head -1`` ends without a traceback."""
    command = [sys.executable, "-u", *RUN[1:], "info", str(dataset)]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in result.stderr


def test_log_lines_without_a_terminal(synthetic_folder, tmp_path, capsys, monkeypatch):
    """In a log file, progress is plain lines with count, rate and time left, no control characters."""
    monkeypatch.setattr(progress, "_SECONDS_PER_LOG", -1.0)
    assert (
        main(
            ["encode", str(synthetic_folder), str(tmp_path), "--num-shards", "3", "--workers", "1"]
        )
        == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(
        re.fullmatch(r"encode: \d+/24 images, \d+ images/s, \S+ .*left", line) for line in lines
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


def test_an_interrupt_is_one_line(synthetic_folder, tmp_path, monkeypatch):
    """Ctrl-C ends with one line and the shell's exit code for it."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "encode", interrupted)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert main(["encode", str(synthetic_folder), str(tmp_path)]) == 130
    assert err.getvalue() == "pcrshard encode: stopped\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (3570, "1 h 0 min"), (86400, "24 h 0 min")],
)
def test_human_seconds(seconds, text):
    """Durations are short and never show sixty of a unit."""
    assert human_seconds(seconds) == text


def test_info_of_a_dataset_by_shard_writer(tmp_path, capsys):
    """Datasets written from Python are datasets for the command line."""
    with ShardWriter(str(tmp_path)) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg(), "txt": "x"})
    assert main(["info", str(tmp_path)]) == 0
    assert "fields: txt" in capsys.readouterr().out
    assert pathlib.Path(tmp_path / "pcr.json").exists()
