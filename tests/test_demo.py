"""The demonstration runs and tells the truth."""

from pcrshard.demo import run_demo
from pcrshard.reader import open_dataset


def test_the_demo_runs_end_to_end(tmp_path, capsys):
    """A new user sees sizes, two trainings and a picture; the bytes it claims are the prefixes it read."""
    low, full = run_demo(None, str(tmp_path), epochs=1)
    index, _ = open_dataset(str(tmp_path / "train"))
    assert (low.bytes_read, full.bytes_read) == (index.prefix_bytes(2), index.prefix_bytes("full"))
    assert low.accuracy > 0.4
    assert (tmp_path / "scans.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "saving" in text
    assert "images/s" in text
