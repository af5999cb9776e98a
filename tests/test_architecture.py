"""Who may import whom, how large things may be, and what is public."""

import ast
import sys

import pytest
from conftest import ROOT

import pcrshard

PACKAGE = ROOT / "pcrshard"
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
# Each third-party package has one door; numpy and torch are vocabulary.
DOORS = {
    "PIL": {"pixels", "testing"},
    "braceexpand": {"storage"},
    "cffi": {"native.build_native"},
    "crc32c": {"index"},
    "datasets": {"hf"},
    "distributed": {"engines"},
    "fsspec": {"storage", "testing"},
    "matplotlib": {"plots"},
    "msgpack": {"index"},
    "sklearn": {"demo"},
    "pyarrow": {"hf"},
    "torchmetrics": {"fidelity.measure"},
    "submitit": {"engines"},
    "tqdm": {"cliparts"},
    "turbojpeg": {"pixels"},
    "webdataset": {"wds"},
}
# Training side; wds hands tensors to torch users, and WebDataset imports torch itself.
MAY_USE_TORCH = {"collate", "dataset", "demo", "fidelity.measure", "fidelity.tuner", "wds"}
# What each module may import of the package: nothing that stands further down.
ORDER = [
    "_version", "_on_import", "errors", "plan", "needs", "markers", "jpeg", "script", "index", "dataset_index", "retry", "shared", "buffers", "pipes", "remote", "native._core", "native.build_native", "native.__init__", "native._scatter", "native.scatter", "local", "storage", "cache", "prefetch", "members", "pixels", "crops", "decoder", "fidelity.level", "fidelity.schedule", "fidelity.bandwidth", "fidelity.__init__",
    "writer", "prefix", "joined", "reader", "batches", "ranks", "shardlists", "stage", "sources", "parallel", "engines", "journal", "encode", "verify", "export", "report", "plots", "wds", "collate", "dataset", "fidelity.tuner", "fidelity.measure", "hf", "demo", "testing", "__init__", "cliparts", "cli_read", "cli",
]  # fmt: skip


def imports(name):
    """(package, module) of every import, relative ones as the module's name in this package."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            package, _, module = node.module.partition(".")
            yield package, module or None
        elif isinstance(node, ast.ImportFrom):
            folder = name.split(".")[: -node.level]
            base = ".".join([*folder, *(node.module.split(".") if node.module else [])])
            for target in [base] if base in MODULES else [f"{base}.{a.name}".strip(".") for a in node.names]:
                yield "pcrshard", f"{target}.__init__" if f"{target}.__init__" in MODULES else target


@pytest.mark.parametrize("name", MODULES)
def test_each_dependency_has_one_door(name):
    """A third-party package is imported by one module, so that it can be replaced there."""
    for package, _ in imports(name):
        if package in sys.stdlib_module_names or package in ("numpy", "pcrshard"):
            continue
        allowed = MAY_USE_TORCH if package == "torch" else DOORS[package]
        assert name in allowed, f"{name} imports {package}, whose door is {sorted(allowed)}"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    """No cycles: a module imports only what stands above it."""
    for package, target in imports(name):
        if package == "pcrshard" and target != "__version__":
            assert ORDER.index(target) < ORDER.index(name), f"{name} imports {target}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_functions_stay_small(name):
    """A person can hold a module in the head."""
    lines = MODULES[name].read_text().count("\n")
    assert lines <= 520, f"{name}: {lines} lines"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node, clean=False) or ""
            length = node.end_lineno - node.lineno + 1 - doc.count("\n")
            arguments = len(node.args.args) + len(node.args.kwonlyargs)
            assert length <= 50, f"{name}.{node.name}: {length} lines"
            assert arguments <= 10, f"{name}.{node.name}: {arguments} arguments"


def test_public_names_are_these():
    """What users import does not vanish or grow by accident."""
    assert sorted(pcrshard.__all__) == [
        "BandwidthTuner", "DatasetIndex", "EncodeOptions", "EpochOptions", "ImageDecoder", "JpegHandler", "PCRDataset", "PCRError", "PrefixCache", "ReadOptions", "Retry", "ScanLevel", "ScanTuner", "Shard", "ShardFormat", "ShardIndex", "ShardWriter",
        "__version__", "decode_image", "encode", "join_scans", "open_dataset", "pcr_decode", "pcr_scan", "shards", "split_by_node", "split_scans", "stage",
    ]  # fmt: skip
    assert all(getattr(pcrshard, name) is not None for name in pcrshard.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pcrshard.nonsense


def test_public_things_are_documented():
    """Every public function and class says what it is for."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node in tree.body:
                assert ast.get_docstring(node), f"{name}.{node.name}"
