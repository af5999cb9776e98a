"""``pcrshard encode``: what it tells, what it refuses, and how it ends."""

import os
import signal
import subprocess

import pytest
from command_line import RUN, check_one_line, run
from support import wait_for, write_files

from pcrshard import Shard, open_dataset
from pcrshard.testing import make_jpeg


@pytest.fixture
def source(tmp_path):
    """A folder with one good image."""
    return write_files(tmp_path / "src", {"good.jpg": make_jpeg()})


def test_a_skipped_file_whose_name_is_not_utf8(source, tmp_path):
    """A name from another locale is printed somehow; a long run does not end in UnicodeError."""
    with open(os.path.join(os.fsencode(source), b"bad-\xff.jpg"), "wb") as file:
        file.write(b"bad")
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    result = run("encode", source, tmp_path / "dst", "--on-error", "skip", env=env)
    assert result.returncode == 0
    assert result.stderr == "writing 2 samples to 1 shards, script standard\n"


def test_a_full_disk(synthetic_folder, tmp_path, cli):
    """It is one line that names the shard, and --resume goes on from there."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
    line = ["encode", str(synthetic_folder), str(tmp_path), "--num-shards", "2", "--workers", "1"]
    command = [*RUN[:4], limit + RUN[4], *line]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    check_one_line(result.returncode, result.stderr, "data-00000")
    assert not list(tmp_path.glob("*.tar"))
    assert cli(*line, "--resume")[0] == 0


def test_an_error_in_a_worker_is_one_line(source, tmp_path):
    """An error that crossed a process boundary shows no traceback of the worker."""
    (source / "2.jpg").write_bytes(make_jpeg()[:200])
    result = run("encode", source, tmp_path / "dst", "--num-shards", "2", "--workers", "2")
    check_one_line(result.returncode, result.stderr, "2.jpg", "--on-error skip")


def test_every_option_reaches_the_dataset(synthetic_folder, tmp_path, cli):
    """Order, script, layout and names on the command line are those of the shards."""
    script = tmp_path / "two.txt"
    script.write_text("0,1,2: 0-0, 0, 0;\n0: 1-63, 0, 0;\n1: 1-63, 0, 0;\n2: 1-63, 0, 0;\n")
    options = ["--keep-order", "--num-shards", "2", "--name", "photo", "--script", script]
    layout = ["--layout", "preview", "--base", "1", "--preview-fields", "cls", "--workers", "1"]
    status, text, _ = cli("encode", synthetic_folder, tmp_path / "out", *options, *layout)
    assert (status, "samples: 24\nshards: 2\n" in text) == (0, True)
    index, urls = open_dataset(tmp_path / "out")
    assert (index.script, index.num_groups) == ("two", 4)
    assert [os.path.basename(url) for url in urls] == ["photo-000000.tar", "photo-000001.tar"]
    keys = [sample["__key__"] for url in urls for sample in Shard(url).samples(1)]
    assert keys == sorted(keys)
    assert Shard(urls[0]).index.schema.layout == "preview"


def test_an_interrupted_encode_is_resumed(source, tmp_path, cli):
    """Ctrl-C while shards are written names --resume, and that finishes the dataset."""
    write_files(source, dict.fromkeys(map("{}.jpg".format, range(63)), make_jpeg(1, 500, 700)))
    line = ["encode", str(source), str(tmp_path / "dst"), "--num-shards", "16", "--workers", "2"]
    # Without -W error: what an interrupt leaves open is left to the garbage collector.
    with subprocess.Popen([RUN[0], *RUN[3:], *line], stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list((tmp_path / "dst").glob("*.tar")))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("encode: stopped; the same command with --resume continues from here\n")
    assert not (tmp_path / "dst" / "pcr.json").exists()
    assert cli(*line, "--resume")[0] == 0
    assert open_dataset(tmp_path / "dst")[0].num_samples == 64


def test_parts_say_when_others_are_missing(synthetic_folder, tmp_path, cli):
    """Of two parts the first ends without a dataset, and says so; the second writes the index."""
    command = ["encode", synthetic_folder, tmp_path, "--num-shards", "2", "--part"]
    assert "this part is done; others have shards left" in cli(*command, "0/2")[1]
    assert "samples: 24\nshards: 2\n" in cli(*command, "1/2")[1]
