"""pcrshard index, and the other commands over plain tars."""

import pytest
from support import write_tar

from pcrshard.testing import make_jpeg


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two plain tars of four samples."""
    folder = tmp_path_factory.mktemp("tars")
    for number in range(2):
        members = {}
        for i in range(4 * number, 4 * number + 4):
            members |= {f"k{i}.jpg": make_jpeg(i, 48, 40 + i), f"k{i}.cls": b"%d" % (i % 2)}
        write_tar(folder / f"t{number}.tar", members)
    return folder


def test_commands_over_plain_tars(cli, tars, tmp_path):
    """After index, the commands that need no scans read plain tars; fidelity says what to do."""
    code, out, _ = cli("index", tars, tmp_path / "index", "--json")
    report = out
    assert code == 0
    assert report["url"] == str(tmp_path / "index")
    assert (report["tars"], report["listed"], report["samples"]) == (2, 2, 8)
    assert report["fields"] == ["jpg=image", "cls=class"]
    code, out, _ = cli("index", tars, tmp_path / "index", "--part", "0/2", "--json")
    assert out["listed"] == 0
    index = tmp_path / "index"
    code, out, _ = cli("info", index, "--classes", "--json")
    report = out
    assert (code, report["samples"], report["samples_per_class"]) == (0, 8, {"0": 4, "1": 4})
    assert [scan["scan"] for scan in report["scans"]] == ["full"]
    for command in (
        ["verify", index],
        ["check", index],
        ["plan", index],
        ["plan", index, "--simulate", "100", "--decode", "100"],
        ["export", index, tmp_path / "out"],
        ["stage", index, tmp_path / "staged", "--scan", "full"],
        ["verify", tmp_path / "staged"],
        ["card", index],
    ):
        code, out, error = cli(*command)
        assert code == 0, (command, out, error)
    exported = sorted((tmp_path / "out").rglob("*.jpg"))
    assert [path.read_bytes() for path in exported] == [make_jpeg(i, 48, 40 + i) for i in range(8)]
    for command in (["fidelity", index], ["stage", index, tmp_path / "other", "--scan", "2"]):
        code, _, error = cli(*command)
        assert code == 1
        assert "the only one of plain tars" in error


def test_what_is_left_out_is_reported(cli, tars, tmp_path):
    """Bad samples end the command, or are counted with --on-error skip."""
    (tmp_path / "bad").mkdir()
    write_tar(tmp_path / "bad" / "a.tar", {"x.jpg": make_jpeg(1), "y.a b": make_jpeg(2)})
    code, _, error = cli("index", tmp_path / "bad")
    assert code == 1
    assert "does not give a valid key and field" in error
    code, out, _ = cli("index", tmp_path / "bad", "--on-error", "skip", "--json")
    report = out
    assert (code, report["samples"], report["skipped"]) == (0, 1, 1)
