"""``pcrshard verify``: a proof that a dataset is whole, and shows what its source shows."""

import json
import shutil

from pcrshard import EncodeOptions, encode
from pcrshard.cli.main import main
from pcrshard.testing import make_jpeg


def test_kept_files_are_compared_too(tmp_path, capsys):
    """What could not be rearranged is in the dataset byte for byte, and a changed byte is found."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jpg").write_bytes(make_jpeg(1, 20, 30))
    (source / "b.jpg").write_bytes(b"\xff\xd8 no JPEG")
    encode(str(source), str(tmp_path / "pcr"), EncodeOptions(on_error="keep"), workers=1)
    command = ["verify", str(tmp_path / "pcr"), "--against", str(source), "--workers", "1"]
    assert main(command) == 0
    assert "pixels equal" in capsys.readouterr().out
    (source / "b.jpg").write_bytes(b"\xff\xd8 no JPEg")
    command = [
        "verify",
        str(tmp_path / "pcr"),
        "--against",
        str(source),
        "--json",
        "--workers",
        "1",
    ]
    assert main(command) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "key=b" in problem


def test_a_missing_shard_is_a_problem(dataset, tmp_path, capsys):
    """The shard that is not there is named, and the others are looked at."""
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / "data-000001.tar").unlink()
    assert main(["verify", str(copy), "--workers", "1"]) == 1
    assert "data-000001.tar" in capsys.readouterr().out
