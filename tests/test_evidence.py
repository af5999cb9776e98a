"""python -m evidence: pages say what the data say, and quick runs measure, draw and render."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from support import ROOT, run_python

for package in ("hydra", "torch", "matplotlib", "cv2", "simpy", "efficientnet_lite_pytorch"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

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


@pytest.mark.changed("evidence")
@pytest.mark.parametrize("page", [f"{subject}/README.md" for subject in SUBJECTS])
def test_pages_say_what_the_data_say(rendered, page):
    """A reader sees the numbers that were measured: the page is its template and its data."""
    kept = ROOT / "evidence" / page
    text = kept.read_text()
    assert (rendered / page).read_text() == text, "run python -m evidence SUBJECT --existing"
    assert "{{" not in text
    assert "Not measured yet" not in text
    assert all((kept.parent / name).exists() for name in PICTURE.findall(text))


def test_every_row_says_what_measured_it(tmp_path, monkeypatch):
    """A figure can be tied to code: a row has its commit and versions, and others are refused."""
    monkeypatch.syspath_prepend(str(ROOT))
    from evidence.lab import Lab

    for subject in SUBJECTS:
        for file, counts in Lab(str(ROOT / "evidence"), subject).sources().items():
            assert counts, file
    lab = Lab(str(tmp_path), "pcr")
    lab.append({"figure": 1})
    (source,) = lab.sources()["runs.jsonl"]
    assert re.fullmatch(r"[0-9a-f]{7,}, PyTorch \S+", source)
    with open(tmp_path / "pcr" / "runs.jsonl", "a") as file:
        file.write('{"figure": 2}\n')
    with pytest.raises(ValueError, match="no commit and versions"):
        lab.sources()


def evidence(out, *arguments):
    """Run python -m evidence --quick with temporary files beside ``out``; what it prints."""
    environment = {"TMPDIR": str(out.parent), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.environ["PATH"] + ":/usr/sbin:/sbin"
    words = ("-m", "evidence", *arguments, "--quick", "--out", out)
    return run_python(*words, env=environment, cwd=ROOT, timeout=1200)


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
    for name in shown:
        with image.open(out / subject / name) as picture:
            assert picture.width == 800
    return page


def rows(out, subject, name="runs"):
    lines = (out / subject / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def results(out, subject, name):
    return json.loads((out / subject / f"{name}.json").read_text())["results"]


@pytest.mark.long
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


def test_readers_of_a_slow_link_have_its_rate_together(tmp_path, monkeypatch):
    """Runs at a limited bandwidth get the file's bytes, and together no more of them than that."""
    monkeypatch.syspath_prepend(str(ROOT))
    from evidence.server import serve

    content = bytes(range(250)) * 240
    (tmp_path / "file").write_bytes(content)
    with serve(tmp_path, 200_000) as (url, link), ThreadPoolExecutor() as threads:
        begun = time.monotonic()
        found = list(threads.map(lambda _: urlopen(f"{url}/file").read(), range(2)))
    assert time.monotonic() - begun > 0.5
    assert found == [content] * 2
    assert link.bytes == 2 * len(content)


# Sections that were measured once; quick runs have one crop and one network of ImageNet.
MISSING = {
    "pcr": {"'bandwidth' is undefined"},
    "deltadnn": {
        "'dict object' has no attribute 'literal'",
        "'dict object' has no attribute 'coders'",
    },
    "activations": {"'memory' is undefined", "'errors' is undefined"},
    "imagenet": {"'dict object' has no attribute 'lite2'", "'crops' is undefined"},
    "finetuning": {
        "'link' is undefined",
        "'dict object' has no attribute 'lite0'",
        "'dict object' has no attribute 'resnet'",
    },
}


@pytest.mark.long
@pytest.mark.parametrize("subject", ["pcr", "deltadnn", "activations", "imagenet", "finetuning"])
def test_quick_runs_measure_every_section(tmp_path, subject):
    """Every section of a page can be measured again, and a second run measures nothing."""
    if subject == "deltadnn":
        pytest.importorskip("pysz")
    out = tmp_path / "evidence"
    evidence(out, subject)
    page = check(out, subject)
    assert set(re.findall(r"Not measured yet \((.+?)\):", page)) == MISSING.get(subject, set())
    before = {path.name: path.read_bytes() for path in (out / subject).glob("*.json*")}
    evidence(out, subject)
    assert {path.name: path.read_bytes() for path in (out / subject).glob("*.json*")} == before
    CHECKS.get(subject, lambda _: None)(out)


def check_checkpoints(out):
    """Ours is smaller than SZ3 and lossless coders; an exact resume repeats to the last bit."""
    runs = rows(out, "deltadnn")
    for run in runs:
        assert run["chains"]["fixed"]["stored_bytes"] > 0
        if "rivals" in run:
            fixed, sz3 = (
                next(row["ratio"] for row in found["table"] if row["bound"] == 0.01)
                for found in (run["pairs"]["2"]["ours"], run["rivals"]["sz3"])
            )
            assert fixed > sz3 > run["rivals"]["lossless"]["LZMA"] > 1
    resumed = [row for run in runs for row in run["resume"]["rows"]]
    again = [row for row in resumed if "again_loss" in row]
    assert len(again) == 2
    assert all(row["again_loss"] == row["exact_loss"] for row in again)


def check_activations(out):
    """Plain and compressed runs of a seed differ, and every saved byte is counted and freed."""
    runs = {(run["spec"]["arm"], run["spec"]["seed"]): run for run in rows(out, "activations")}
    for seed in (0, 1):
        plain, close = (runs[arm, seed]["rows"][-1][0] for arm in ("plain", "0.05 std"))
        assert plain != close
        assert plain == pytest.approx(close, rel=0.2)
    for network in results(out, "activations", "ratios")["networks"].values():
        for case in network["cases"].values():
            assert case["live_bytes_after"] == 0
            assert sum(raw for raw, _ in case["kinds"].values()) == case["raw_bytes"]


def check_imagenet(out):
    """The last scan gets the guesses of the source; prefixes grow with the scan."""
    plain = rows(out, "imagenet")[0]["marks"]
    assert plain["standard 10"] == plain["q95 10"] == plain["source full"]
    sizes = results(out, "imagenet", "bytes")["bytes"]
    prefixes = [sizes[f"standard {scan}"] for scan in range(1, 11)]
    assert prefixes == sorted(prefixes)


def check_finetuning(out):
    """Seeds are paired, a tuning costs bytes, and a low scan reads fewer."""
    found = {(row["task"], row["kind"]): row for row in rows(out, "finetuning")}
    for task in ("waves", "ripples"):
        full, tuned, low = (found[task, kind] for kind in ("full", "tuner", 1))
        # Before the first tuning both runs are the same run.
        assert tuned["epochs"][0] == full["epochs"][0]
        (tuning,) = tuned["tunings"]
        read = sum(epoch["bytes"] for epoch in tuned["epochs"])
        rest = found[task, tuning["scan"]]["epochs"][1]["bytes"]
        assert read == pytest.approx(full["epochs"][0]["bytes"] + rest + tuning["bytes"])
        assert low["epochs"][0]["bytes"] < full["epochs"][0]["bytes"]


CHECKS = {
    "deltadnn": check_checkpoints,
    "activations": check_activations,
    "imagenet": check_imagenet,
    "finetuning": check_finetuning,
}


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


def test_networks_that_were_trained_otherwise_are_not_taken(tmp_path, monkeypatch):
    """Checkpoints of an earlier recipe or network of the same name are left where they are."""
    monkeypatch.syspath_prepend(str(ROOT))
    training = importlib.import_module("evidence.deltadnn.training")
    monkeypatch.setattr(training, "_train", lambda *_: iter([]))
    lab, data = SimpleNamespace(cache=str(tmp_path)), SimpleNamespace(classes=2)
    recipe = training.QUICK_RECIPES[0]
    others = [dataclasses.replace(recipe, **{key: 2}) for key in ("epochs", "size", "lr")]
    others.append(dataclasses.replace(recipe, network="small_resnet"))
    folders = {training.trained(lab, each, 0, data).folder for each in [recipe, *others]}
    assert len(folders) == 5
    same = dataclasses.replace(recipe, seeds=(0, 1, 2))
    assert training.trained(lab, same, 0, data).folder in folders


def test_photographs_that_are_left_out_are_named(tmp_path, monkeypatch, capsys):
    """A row is missing for a reason that the output says."""
    monkeypatch.syspath_prepend(str(ROOT))
    levels = importlib.import_module("evidence.levels.measure")
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "broken.jpg").write_bytes(b"\xff\xd8")
    lab = SimpleNamespace(unpacked=lambda _: str(tmp_path))
    assert list(levels.colors(lab, "set")) == []
    assert "left out broken.jpg" in capsys.readouterr().out
