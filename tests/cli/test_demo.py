"""The demonstration runs and tells the truth."""

import pytest

from pcrshard.cli.demo import run_demo
from pcrshard.errors import EncodeError
from pcrshard.reading.dataset_folder import open_dataset


def test_the_demo_touches_no_folder_of_the_user(tmp_path):
    """What is in the target folder stays, and the demonstration says so."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.jpg").write_bytes(b"mine")
    with pytest.raises(EncodeError, match="holds files"):
        run_demo(None, str(tmp_path), epochs=1)
    assert (tmp_path / "photos" / "mine.jpg").read_bytes() == b"mine"


def test_the_demo_runs_end_to_end(tmp_path, capsys):
    """A new user sees sizes, two trainings and a picture; the bytes it claims are those it read."""
    low, full = run_demo(None, str(tmp_path), epochs=1)
    index, _ = open_dataset(str(tmp_path / "train"))
    assert (low.bytes_read, full.bytes_read) == (index.prefix_bytes(2), index.prefix_bytes("full"))
    assert low.accuracy > 0.4
    assert (tmp_path / "scans.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "saving" in text
    assert "images/s" in text
