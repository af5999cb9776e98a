"""``pcrshard card``."""

import shutil

from pcrshard.cli.main import main


def test_a_card_is_not_overwritten_by_accident(dataset, tmp_path, capsys, fails):
    """What somebody has written into README.md stays, until --overwrite."""
    folder = shutil.copytree(dataset, tmp_path / "pets")
    assert main(["card", str(folder), "--url", "hf://datasets/me/pets"]) == 0
    assert "README.md and" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "# pets\n" in card
    assert "load_dataset('hf://datasets/me/pets', scan=5, streaming=True)" in card
    (folder / "README.md").write_text("mine")
    fails("card", folder, words=["--overwrite"])
    assert (folder / "README.md").read_text() == "mine"
    assert main(["card", str(folder), "--overwrite", "--name", "other"]) == 0
    assert "# other\n" in (folder / "README.md").read_text()


def test_a_card_needs_a_dataset(tmp_path, fails):
    """A URL, a file and an empty folder are refused in a sentence."""
    fails("card", "s3://bucket/pets", words=["local folder"])
    fails("card", tmp_path, words=["no pcr.json there", "pcrshard encode"])
