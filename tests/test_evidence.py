"""python -m evidence: pages say what the data say, and quick runs measure, draw and render."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

for package in ("hydra", "torch", "matplotlib", "cv2", "simpy", "efficientnet_lite_pytorch"):
    pytest.importorskip(package)

SUBJECTS = sorted(page.parent.name for page in (ROOT / "evidence").glob("*/page.md"))
PICTURE = re.compile(r"!\[[^\]]+\]\(([\w-]+\.png)\)")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """All pages, rendered again from the data in a folder of their own; pictures are not saved."""
    figure = pytest.importorskip("matplotlib.figure")
    out = tmp_path_factory.mktemp("evidence")
    for subject in SUBJECTS:
        (out / subject).mkdir()
        for path in (ROOT / "evidence" / subject).glob("*.json*"):
            shutil.copy(path, out / subject)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setattr(figure.Figure, "savefig", lambda *_, **__: None)
        from evidence.__main__ import main

        for subject in SUBJECTS:
            main([subject, "--existing", "--out", str(out)])
    return out


@pytest.mark.parametrize("page", [f"{subject}/README.md" for subject in SUBJECTS])
def test_pages_say_what_the_data_say(rendered, page):
    """A reader sees the numbers that were measured: the page is its template and its data."""
    kept = ROOT / "evidence" / page
    text = kept.read_text()
    assert (rendered / page).read_text() == text, "run python -m evidence SUBJECT --existing"
    assert "{{" not in text
    assert "Not measured yet" not in text
    assert all((kept.parent / name).exists() for name in PICTURE.findall(text))


def evidence(out, *arguments):
    """Run python -m evidence --quick with temporary files beside ``out``; what it prints."""
    environment = os.environ | {"TMPDIR": str(out.parent), "OMP_NUM_THREADS": "1"}
    environment["PATH"] += ":/usr/sbin:/sbin"
    done = subprocess.run(
        [sys.executable, "-m", "evidence", *arguments, "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(out, subject):
    """The page of a subject, whose pictures are there, 800 pixels wide."""
    image = pytest.importorskip("PIL.Image")
    page = (out / subject / "README.md").read_text()
    assert "{{" not in page
    assert "| --- |" in page
    measured = page.split("## ")
    shown = [
        name for part in measured if "Not measured" not in part for name in PICTURE.findall(part)
    ]
    assert shown
    for name in shown:
        with image.open(out / subject / name) as picture:
            assert picture.width == 800
    return page


def rows(out, subject, name="runs"):
    lines = (out / subject / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def results(out, subject, name):
    return json.loads((out / subject / f"{name}.json").read_text())["results"]


def test_parts_are_measured_once_and_the_rest_is_said_to_be_missing(tmp_path):
    """A stopped command resumes: what is there is kept, and a page never has a gap."""
    out = tmp_path / "evidence"
    evidence(out, "pcr", "sizes", "epochs")
    page = check(out, "pcr")
    assert "Not measured yet ('decode' is undefined): `python -m evidence pcr`" in page
    before = {path.name: path.read_bytes() for path in (out / "pcr").glob("*.json*")}
    assert "seed" not in evidence(out, "pcr", "sizes", "epochs")
    assert {path.name: path.read_bytes() for path in (out / "pcr").glob("*.json*")} == before
    assert (out / "pcr" / "README.md").read_text() == page


def test_quick_runs_stay_out_of_the_evidence(monkeypatch, capsys):
    """Figures of a smoke run never land among the real ones."""
    monkeypatch.syspath_prepend(str(ROOT))
    from evidence.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(["pcr", "--quick", "--out", str(ROOT / "evidence")])
    assert "need another --out" in capsys.readouterr().err


@pytest.mark.long
def test_all_of_the_papers_figures(tmp_path):
    """Every section of the page is measured, but for networks that other subjects train."""
    out = tmp_path / "evidence"
    evidence(out, "pcr")
    page = check(out, "pcr")
    assert "Not measured yet" not in page


@pytest.mark.long
def test_checkpoints_are_smaller_and_resume_exactly(tmp_path):
    """Ours is smaller than SZ3 and lossless coders; what restored runs are compared with is the
    same run to the last bit.
    """
    pytest.importorskip("pysz")
    out = tmp_path / "evidence"
    evidence(out, "deltadnn")
    check(out, "deltadnn")
    runs = rows(out, "deltadnn")
    assert {run["recipe"]["optimizer"] for run in runs} == {"sgd", "adamw"}
    for run in runs:
        for pair in run["pairs"].values():
            ratios = [row["ratio"] for row in pair["ours"]["table"]]
            assert ratios == sorted(ratios)
        chain = run["chains"]["fixed"]
        assert chain["stored_bytes"] > sum(file["bytes"] for file in chain["files"])
        if "rivals" in run:
            rivals = run["rivals"]
            fixed, sz3 = (
                next(row["ratio"] for row in found["table"] if row["bound"] == 0.01)
                for found in (run["pairs"]["2"]["ours"], rivals["sz3"])
            )
            assert fixed > sz3 > rivals["lossless"]["LZMA"] > 1
    resumed = [row for run in runs for row in run["resume"]["rows"]]
    again = [row for row in resumed if "again_loss" in row]
    assert len(again) == 2
    assert all(row["again_loss"] == row["exact_loss"] for row in again)
    assert all(abs(row["restored_loss"] / row["exact_loss"] - 1) < 0.02 for row in resumed)
    assert "CPU s" not in evidence(out, "deltadnn")


@pytest.mark.long
def test_compressed_trainings_are_paired_and_leave_nothing_alive(tmp_path):
    """Plain runs and others of one seed differ, and not by much; every saved byte is counted."""
    out = tmp_path / "evidence"
    evidence(out, "activations")
    check(out, "activations")
    runs = {(run["spec"]["arm"], run["spec"]["seed"]): run for run in rows(out, "activations")}
    for seed in (0, 1):
        plain, close = (runs[arm, seed]["rows"][-1][0] for arm in ("plain", "0.05 std"))
        assert plain != close
        assert plain == pytest.approx(close, rel=0.2)
    assert runs["0.1 std, images too", 0]["ratio"] > runs["0.05 std", 0]["ratio"] > 1.5
    for network in results(out, "activations", "ratios")["networks"].values():
        for case in network["cases"].values():
            assert case["live_bytes_after"] == 0
            assert sum(raw for raw, _ in case["kinds"].values()) == case["raw_bytes"]
    errors = results(out, "activations", "noise")["errors"]
    assert errors["largest_at_zeros"] == 0
    assert errors["largest"] <= 1


@pytest.mark.long
def test_every_scan_is_seen_by_a_pretrained_network(tmp_path):
    """Each point has a mark for each photograph; the last scan has the guesses of the source."""
    out = tmp_path / "evidence"
    evidence(out, "imagenet")
    check(out, "imagenet")
    plain, smooth = (row["marks"] for row in rows(out, "imagenet"))
    assert len(plain) == 22
    assert len(smooth) == 18
    assert {len(marks) for marks in plain.values()} == {3}
    assert plain["standard 10"] == plain["q95 10"] == plain["source full"]
    guesses = results(out, "imagenet", "guesses")
    assert guesses["labels"] == "0 1 2"
    assert max(guesses["msssim"].values()) == 1
    sizes = results(out, "imagenet", "bytes")["bytes"]
    prefixes = [sizes[f"standard {scan}"] for scan in range(1, 11)]
    assert prefixes == sorted(prefixes)


@pytest.mark.long
def test_networks_are_tuned_at_each_scan(tmp_path):
    """Seeds are paired, a tuning costs bytes, a second run trains nothing."""
    out = tmp_path / "evidence"
    assert "CPU s" in evidence(out, "finetuning", "tails")
    check(out, "finetuning")
    found = {(row["task"], row["kind"]): row for row in rows(out, "finetuning")}
    for task in ("waves", "ripples"):
        full, tuned, low = (found[task, kind] for kind in ("full", "tuner", 1))
        assert full["accuracy"]["full"] > 0.6
        # Before the first tuning both runs are the same run.
        assert tuned["epochs"][0] == full["epochs"][0]
        (tuning,) = tuned["tunings"]
        read = sum(epoch["bytes"] for epoch in tuned["epochs"])
        rest = found[task, tuning["scan"]]["epochs"][1]["bytes"]
        assert read == pytest.approx(full["epochs"][0]["bytes"] + rest + tuning["bytes"])
        assert low["epochs"][0]["bytes"] < full["epochs"][0]["bytes"]
    assert "CPU s" not in evidence(out, "finetuning", "tails")


@pytest.mark.long
def test_whole_networks_are_trained_at_each_scan(tmp_path):
    """A low scan reads fewer bytes, and every run is tested at every scan."""
    out = tmp_path / "evidence"
    evidence(out, "finetuning", "layers")
    check(out, "finetuning")
    found = {(row["network"], row["kind"]): row for row in rows(out, "finetuning", "layers")}
    for network in ("EfficientNet-Lite0, all layers", "ResNet-18 from scratch"):
        sizes = [found[network, kind]["epochs"][0]["bytes"] for kind in (2, 5, "full")]
        assert sizes == sorted(set(sizes))
        assert found[network, "full"]["accuracy"].keys() == {"1", "2", "5", "full"}


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nginx", "curl"))),
    reason="NO SHAPED LINKS: needs root and apt-get install iproute2 nginx-light curl",
)
def test_a_real_cluster_and_its_simulation(tmp_path):
    """What nginx was asked for is what the simulation asks for, byte for byte; rates are alike."""
    out = tmp_path / "evidence"
    evidence(out, "clusters")
    check(out, "clusters")
    (row,) = results(out, "clusters", "validation")["rows"]
    for name in ("requests", "sent_bytes"):
        assert row["real"][name] == row["simulated"][name]
    # Loosely, because tests run side by side.
    ratio = row["simulated"]["images_per_second"] / row["real"]["images_per_second"]
    assert 0.4 < ratio < 2.5
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert "pcrsim" not in left.stdout
