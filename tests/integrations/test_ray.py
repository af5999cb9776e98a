"""A real local Ray with two workers reads shards, and runs a network over them."""

import json
import re

import pytest
from support import ROOT, run_python

import pcrshard

pytest.importorskip("ray.data", reason="RAY IS NOT INSTALLED: pip install 'ray[data]'")

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
BLOCK = re.search(r"^```python ray\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
# The page's own program, and what else is asked of the datasource.
PROGRAM = f"""
{BLOCK}
import json, sys
labels = {{row["key"]: int(row["label"]) for row in rows}}
sums = {{row["key"]: float(row["embedding"].sum()) for row in rows}}
embed = Embed()
_, urls = pcrshard.open_dataset("shards")
for url in urls:
    for sample in pcrshard.Shard(url).samples(2):
        one = {{"jpg": [sample["jpg"]], "__key__": [""], "cls": [0]}}
        here = float(embed(one)["embedding"].sum())
        assert abs(here - sums[sample["__key__"]]) < 1e-4
tasks = [len(source.get_read_tasks(n)) for n in (1, 3, 100)]
sizes = [task.metadata.num_rows for task in source.get_read_tasks(3)]
odd = PCRDatasource("lists", scan=5, fields=("__key__", "views.jpg", "txt"))
views = [[len(r["views.jpg"]), r["txt"]] for r in ray.data.read_datasource(odd).take_all()]
full = ray.data.read_datasource(PCRDatasource("shards", scan="full", fields=("jpg",))).limit(3)
print(json.dumps([tasks, sizes, labels, sorted(views), len(full.take_all())]))
ray.shutdown()
"""


@pytest.mark.long
def test_ray_embeds_a_dataset(dataset, tmp_path):
    """Every sample once through two actors, with its label; lists, late fields and limits work."""
    (tmp_path / "shards").symlink_to(dataset)
    lists = tmp_path / "lists"
    jpeg = next(pcrshard.Shard(pcrshard.open_dataset(dataset)[1][0]).samples())["jpg"]
    with pcrshard.ShardWriter(
        lists, fmt=pcrshard.ShardFormat("standard", deferred={"txt": 5})
    ) as writer:
        for i in range(3):
            writer.write({"__key__": f"k{i}", "views.jpg": [jpeg] * (i + 1), "txt": f"t{i}"})
    said = run_python("-W", "ignore", "-c", PROGRAM, cwd=tmp_path)
    tasks, sizes, labels, views, limited = json.loads(said.splitlines()[-1])
    assert tasks == [1, 3, 4]
    assert sum(sizes) == len(labels) == 24
    assert set(labels.values()) == {0, 1}
    assert views == [[1, "t0"], [2, "t1"], [3, "t2"]]
    assert limited == 3


def test_a_scan_that_is_not_there_is_refused_before_ray_starts(dataset):
    """The message comes from this process, not from a worker's log."""
    from pcrshard.integrations.ray import PCRDatasource

    with pytest.raises(pcrshard.PCRError, match="scan"):
        PCRDatasource(str(dataset), scan=11)
    source = PCRDatasource(str(dataset), scan=2)
    index, _ = pcrshard.open_dataset(dataset)
    assert source.estimate_inmemory_data_size() == index.prefix_bytes(2)
