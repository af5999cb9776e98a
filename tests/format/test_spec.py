"""SPEC.md, rule by rule: golden shards, and a file that breaks each rule."""

import json
import os
import re
import shutil

import make_golden
import msgspec
import pytest
import second_reader
from support import ROOT, write_shard

from pcrshard import IndexOptions, Shard, errors, index_tars
from pcrshard.format.dataset_index import DatasetIndex, ShardEntry, ShardTable
from pcrshard.upkeep.verify import VerifyTask, verify_shard

GOLDEN = ROOT / "tests" / "golden" / "v3"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
REJECT = ROOT / "tests" / "vectors" / "reject"
VECTORS = sorted(REJECT.glob("*.bin"))
# What each of them is refused for: another check that refuses it too would hide the rule's own.
MESSAGES = json.loads((REJECT / "messages.json").read_text())
RULES = set(
    re.findall(
        r"\[([a-z0-9-]+)\]",
        re.sub(r"```.*?```", "", (ROOT / "SPEC.md").read_text(), flags=re.DOTALL),
    )
)


def test_every_rule_has_a_vector_and_every_vector_a_rule():
    """No rule of the specification is only words."""
    assert {path.name.split("--")[0] for path in VECTORS} == RULES


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_broken_rule_is_refused_by_its_error(path):
    """A shard that breaks a rule is refused, by the error that the specification names, with the
    file named, and what is wrong with it.
    """
    rule, error = path.stem.rsplit("--", 1)
    with pytest.raises(getattr(errors, error)) as caught:
        _ = Shard(path).index
        Shard(path).load()
    assert path.name in str(caught.value)
    assert MESSAGES[rule] in str(caught.value)


@pytest.mark.parametrize("layout", ["compact", "preview"])
@pytest.mark.parametrize("scan", [*range(11), "full"])
def test_golden_shards_read_as_ever(layout, scan):
    """A shard of version 3 gives the same bytes with every release."""
    expected = EXPECTED[layout]["samples"][str(scan)]
    assert make_golden.digest(Shard(GOLDEN / f"{layout}-000000.tar"), scan) == expected


@pytest.mark.parametrize("layout", ["compact", "preview"])
def test_golden_shards_are_written_as_ever(layout, tmp_path):
    """The same images give the same shard and entry of pcr.json with every release; the shard is
    what its index says.
    """
    samples = make_golden.sources()
    for number, sample in enumerate(samples):
        for name in [name for name in sample if name.endswith("jpg")]:
            stored = sorted((GOLDEN / "sources").glob(f"{number}.{name}.*"))
            images = [path.read_bytes() for path in stored]
            sample[name] = images if isinstance(sample[name], list) else images[0]
    fmt = make_golden.formats()[layout]
    path = tmp_path / f"{layout}-000000.tar"
    encoded = list(map(make_golden.encode, samples))
    entry = write_shard(path, encoded, fmt, make_golden.KINDS)
    assert entry == msgspec.convert(EXPECTED[layout]["entry"], ShardEntry)
    assert path.read_bytes() == (GOLDEN / path.name).read_bytes()
    assert verify_shard(VerifyTask(str(path), None)).problems == ()


@pytest.mark.parametrize("scan", [0, "full"])
def test_a_golden_plain_tar_reads_as_ever(scan):
    """The index of a plain tar gives the same bytes with every release, and to whoever reads it by
    SPEC.md alone.
    """
    shard = make_golden.plain_shard()
    assert make_golden.digest(shard, scan) == EXPECTED["plain"][str(scan)]
    data = (GOLDEN / "plain" / "plain.tar.pcr").read_bytes()
    assert len(data) == shard.prefix_stop(0)
    if scan == "full":
        data += (GOLDEN / "plain" / "plain.tar").read_bytes()
    assert second_reader.Shard(data).read(scan) == list(shard.samples(scan))


def test_a_plain_tar_is_indexed_as_ever(tmp_path):
    """The same tar gives the same index, and the same pcr.json, with every release."""
    for name in ("plain.tar", "plain.tar.pcr", "pcr.json"):
        shutil.copy(GOLDEN / "plain" / name, tmp_path)
    os.utime(tmp_path / "plain.tar", (1, 1))
    options = IndexOptions(checksums=True, kinds=make_golden.PLAIN_KINDS)
    index_tars(tmp_path / "plain.tar", tmp_path / "index", options)
    assert (tmp_path / "index" / "plain.tar.pcr").read_bytes() == (
        tmp_path / "plain.tar.pcr"
    ).read_bytes()
    found = json.loads((tmp_path / "index" / "pcr.json").read_text())
    assert found == json.loads((tmp_path / "pcr.json").read_text()) | {"tars": ".."}


@pytest.mark.parametrize("layout", ["compact", "preview"])
@pytest.mark.parametrize("scan", [*range(11), "full"])
def test_a_reader_written_from_the_specification_agrees(layout, scan):
    """Whoever reads shards by SPEC.md alone gets the same samples."""
    path = GOLDEN / f"{layout}-000000.tar"
    data = path.read_bytes()
    shard = Shard(path)
    end = second_reader.Shard(data).stops[-1 if scan == "full" else scan]
    assert end == shard.prefix_stop(scan)
    assert second_reader.Shard(data[:end]).read(scan) == list(shard.samples(scan))


def test_a_reader_written_from_the_specification_reads_the_dataset_index():
    """Whoever reads pcr.json by SPEC.md alone gets the schema and each shard's numbers."""
    path = GOLDEN / "compact-000000.tar"
    entry = msgspec.convert(EXPECTED["compact"]["entry"], ShardEntry)
    text = DatasetIndex(Shard(path).index.schema, ShardTable.of([entry])).encode()
    schema, rows = second_reader.read_dataset_index(text)
    shard = second_reader.Shard(path.read_bytes())
    stops = [stop // 512 for stop in shard.stops]
    assert schema == shard.schema
    assert rows == {entry.name: (shard.samples, shard.crc, 0, *stops)}
