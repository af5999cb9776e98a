"""``pcrshard encode``: what it tells, what it refuses, and how it ends."""

import os
import re
import signal
import subprocess

from command_line import RUN, check_one_line, run
from support import wait_for

from pcrshard import Shard, open_dataset
from pcrshard.cli.main import main
from pcrshard.testing import make_jpeg


def test_skipped_images_are_told(tmp_path, capsys):
    """--on-error skip ends with how many were skipped, where they are listed, and the first."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(make_jpeg())
    (tmp_path / "src" / "b.jpg").write_bytes(b"bad")
    assert main(["encode", str(tmp_path / "src"), str(tmp_path / "dst"), "--on-error", "skip"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"1 images were skipped.*skipped\.jsonl.*b\.jpg", text)


def test_files_left_out_are_told(tmp_path, capsys):
    """Files beside the images are not encoded, and the output says so."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(make_jpeg())
    (tmp_path / "src" / "README.md").write_text("x")
    assert main(["encode", str(tmp_path / "src"), str(tmp_path / "dst")]) == 0
    captured = capsys.readouterr()
    assert "README.md" in captured.out + captured.err


def test_a_skipped_file_whose_name_is_not_utf8(tmp_path):
    """A name from another locale is printed somehow; a long run does not end in UnicodeError."""
    os.makedirs(tmp_path / "src")
    for name, data in ((b"bad-\xff.jpg", b"bad"), (b"good.jpg", make_jpeg())):
        with open(os.path.join(os.fsencode(tmp_path), b"src", name), "wb") as file:
            file.write(data)
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    result = run("encode", tmp_path / "src", tmp_path / "dst", "--on-error", "skip", env=env)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unwritable_destination(synthetic_folder, tmp_path, fails):
    """A destination below a file is refused with an error that names it."""
    (tmp_path / "file").write_bytes(b"")
    fails("encode", synthetic_folder, tmp_path / "file" / "out", words=["file"])


def test_a_full_disk(synthetic_folder, tmp_path):
    """So is a disk that fills up in the middle of a shard, and --resume goes on from there."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
    line = ["encode", str(synthetic_folder), str(tmp_path), "--num-shards", "2", "--workers", "1"]
    command = [*RUN[:4], limit + RUN[4], *line]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    check_one_line(result.returncode, result.stderr, "data-00000")
    assert not list(tmp_path.glob("*.tar"))
    assert main([*line, "--resume"]) == 0


def test_an_error_in_a_worker_is_one_line(tmp_path):
    """An error that crossed a process boundary shows no traceback of the worker."""
    (tmp_path / "src").mkdir()
    for i in range(4):
        (tmp_path / "src" / f"{i}.jpg").write_bytes(make_jpeg()[: 200 if i == 2 else None])
    result = run(
        "encode", tmp_path / "src", tmp_path / "dst", "--num-shards", "4", "--workers", "2"
    )
    check_one_line(result.returncode, result.stderr, "2.jpg", "--on-error skip")


def test_every_option_reaches_the_dataset(synthetic_folder, tmp_path, capsys):
    """Order, script, layout and names on the command line are those of the shards."""
    script = tmp_path / "two.txt"
    script.write_text("0,1,2: 0-0, 0, 0;\n0: 1-63, 0, 0;\n1: 1-63, 0, 0;\n2: 1-63, 0, 0;\n")
    options = ["--keep-order", "--num-shards", "2", "--name", "photo", "--script", str(script)]
    layout = ["--layout", "preview", "--base", "1", "--preview-fields", "cls", "--workers", "1"]
    folder = tmp_path / "out"
    assert main(["encode", str(synthetic_folder), str(folder), *options, *layout]) == 0
    assert "24 samples in 2 shards" in capsys.readouterr().out
    index, urls = open_dataset(folder)
    assert (index.script, index.num_groups) == ("two", 4)
    assert [os.path.basename(url) for url in urls] == ["photo-000000.tar", "photo-000001.tar"]
    keys = [sample["__key__"] for url in urls for sample in Shard(url).samples(1)]
    assert keys == sorted(keys)
    assert Shard(urls[0]).index.schema.layout == "preview"


def test_an_interrupted_encode_is_resumed(tmp_path):
    """Ctrl-C while shards are written names --resume, and that finishes the dataset."""
    (tmp_path / "src").mkdir()
    jpeg = make_jpeg(1, 500, 700)
    for number in range(64):
        (tmp_path / "src" / f"{number}.jpg").write_bytes(jpeg)
    options = ["--num-shards", "16", "--workers", "2"]
    # Without -W error: what an interrupt leaves open is left to the garbage collector.
    command = [RUN[0], *RUN[3:], "encode", str(tmp_path / "src"), str(tmp_path / "dst"), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list((tmp_path / "dst").glob("*.tar")))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("encode: stopped; the same command with --resume goes on from here\n")
    assert not (tmp_path / "dst" / "pcr.json").exists()
    assert main([*command[3:], "--resume"]) == 0
    assert open_dataset(tmp_path / "dst")[0].num_samples == 64


def test_parts_say_when_others_are_missing(synthetic_folder, tmp_path, capsys):
    """Of two parts the first ends without a dataset, and says so; the second writes the index."""
    command = ["encode", str(synthetic_folder), str(tmp_path), "--num-shards", "2", "--part"]
    assert main([*command, "0/2"]) == 0
    assert "part 0 of 2 is done; other parts have shards left to write" in capsys.readouterr().out
    assert main([*command, "1/2"]) == 0
    assert "24 samples in 2 shards" in capsys.readouterr().out
