"""Who may import whom, and what is public."""

import ast
import collections
import graphlib
import re
import sys

import pytest
from support import ROOT

import pcrshard

PACKAGE = ROOT / "pcrshard"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

# What each room may import of the package by the table there; eight modules are free for all.
# A name with a dot is one module of a room.
FREE = {"arguments", "errors", "redaction", "memory", "checksum", "zstd", "cpus", "lazy"}
ROOMS = {
    room: set(allowed.split(", "))
    for room, allowed in re.findall(r"^\| (\w+) \| (.+) \|$", CONTRIBUTING, re.MULTILINE)
}
# These see everything: the command line, the public names, the short name of an integration.
ABOVE = {"cli", "__init__", "hf"}
TORCH_FREE = {
    "native", "jpeg", "format", "storage", "reading", "checking", "encoding", "upkeep", "errors",
    "memory", "arguments", "checksum", "redaction", "zstd", "cpus", "lazy", "__init__",
    "testing",
}  # fmt: skip
MAX_COLUMNS = 100
MAX_README_LINES = 90


def room_of(name):
    return name.partition(".")[0]


def run_time_nodes(tree):
    """Nodes that run: a name that is imported for its type only is no dependency."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from run_time_nodes(node)


def imports(name):
    """Absolute dotted names that a module imports, ``pcrshard.room.module`` for the package's."""
    for node in run_time_nodes(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = ["pcrshard", *name.split(".")[: -node.level]] if node.level else []
            base = ".".join([*folder, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(name):
    """The modules of the package that a module imports."""
    found = set()
    for target in imports(name):
        package, _, inner = target.partition(".")
        while package == "pcrshard" and inner not in MODULES:
            if f"{inner}.__init__".strip(".") in MODULES:
                inner = f"{inner}.__init__".strip(".")
            else:
                inner = inner.rpartition(".")[0]
        if package == "pcrshard":
            found.add(inner)
    return found - {name}


def test_each_dependency_has_one_importer():
    """A third-party package is imported by one module, so that it can be replaced there."""
    known = {*sys.stdlib_module_names, "numpy", "pcrshard", "msgspec", "PIL", "lazy_loader"}
    importers = collections.defaultdict(set)
    for name in MODULES:
        for package in {room_of(target) for target in imports(name)} - known:
            importers[package].add(name)
    assert not {room_of(name) for name in importers.pop("torch")} & TORCH_FREE
    assert {package: names for package, names in importers.items() if len(names) > 1} == {}


def test_rooms_import_only_what_the_table_allows():
    """The table of CONTRIBUTING.md is the architecture: a room knows only the rooms in its row."""
    for name in MODULES:
        room = room_of(name)
        if room not in ABOVE:
            allowed = ROOMS.get(room, set()) | {room, *FREE}
            for target in own_imports(name):
                assert {target, room_of(target)} & allowed, f"{name} imports {target}"


def test_there_are_no_import_cycles():
    """Each module can be understood from its imports."""
    graphlib.TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()


# A child that inherits one of these while a thread holds it would hang.
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "ThreadPoolExecutor", "ProcessPoolExecutor"}
# One object of a process, rebuilt after a fork by its own module.
KEEPERS = {"activation.entries"}


def test_nothing_that_reaches_a_child_holds_a_lock():
    """A forked worker never waits for a thread that it does not have: locks and pools are in
    functions, or in state that each process makes for itself.
    """
    for name in MODULES.keys() - KEEPERS:
        source = ast.unparse(TREES[name])
        for node in ast.walk(TREES[name]):
            for decorator in getattr(node, "decorator_list", ()):
                # Before Python 3.12, all objects of a class share its lock.
                assert not ast.unparse(decorator).endswith("cached_property"), name
            if isinstance(node, ast.ClassDef) and f"PerProcess({node.name})" not in source:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
                        # Those of asyncio belong to one thread.
                        called = ast.unparse(inner.value.func).removeprefix("threading.")
                        kept = any(isinstance(each, ast.Attribute) for each in inner.targets)
                        assert not (kept and called in LOCKS), f"{name}.{node.name}: {called}"


def files(*patterns):
    """Files of the project that match."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file()]


C_FILES = files("pcrshard/native/src/*.[ch]", "pcrshard/native/*module.c", "fuzz/*.c")
SCRIPTS = files("scripts/*", "scripts/slurm/*", "fuzz/*.sh", "conf/**/*.conf")
PAGES = files("*.md", "docs/**/*.md")
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def test_text_is_read_without_scrolling():
    """Lines have 100 columns, but for Markdown's tables, code blocks, pictures and addresses."""
    texts = {path: path.read_text() for path in [*MODULES.values(), *C_FILES, *SCRIPTS]}
    free = re.compile(r"^(?:\||!\[).*|.*https://.*", re.MULTILINE)
    texts |= {page: free.sub("", BLOCK.sub("", page.read_text())) for page in PAGES}
    wide = [
        (str(path.relative_to(ROOT)), line)
        for path, text in texts.items()
        for line in text.splitlines()
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_a_decision_has_a_number_of_its_own():
    """Code and documents refer to decisions by number."""
    numbers = re.findall(r"^### (\d+)\.", (ROOT / "DECISIONS.md").read_text(), re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 100


def test_c_files_have_no_cycle():
    """A C file can be read after those whose functions it calls."""
    sources = {path.stem: path.read_text() for path in C_FILES if path.suffix == ".c"}
    home = {
        name: stem
        for stem, text in sources.items()
        for name in re.findall(r"^(?!static)\w[\w *]*?\b(pcr_\w+)\(", text, re.MULTILINE)
    }
    assert home["pcr_fail"] == "errors"
    assert home["pcr_optimal_table"] == "encode"
    calls = {
        stem: {home[name] for name in re.findall(r"\bpcr_\w+\b", text) if name in home} - {stem}
        for stem, text in sources.items()
    }
    graphlib.TopologicalSorter(calls).prepare()


def test_the_architecture_is_written_down():
    """CONTRIBUTING.md names every module."""
    tree = re.search(r"^```\n(.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]
    words = set(re.findall(r"\w+", tree))
    private = {"_on_import", "_version", "hf", "__init__", "__main__"}
    assert {name.rpartition(".")[2] for name in MODULES} - private <= words


def test_public_names_are_these():
    """What users import does not vanish or grow by accident."""
    assert sorted(pcrshard.__all__) == [
        "BandwidthTuner", "Buckets", "DatasetIndex", "DeltaStore", "EncodeOptions", "EpochOrder",
        "EpochSampler",
        "ImageDecoder", "IndexOptions", "JpegHandler", "PCRDataset", "PCRError", "PCRLoader",
        "PrefixCache",
        "ReadOptions", "Retry", "ScanLevel", "ScanTuner", "Shard", "ShardFormat", "ShardIndex",
        "ShardWriter",
        "View", "__version__", "compress_activations", "decode_image", "encode", "index_tars",
        "join_scans",
        "open_dataset", "pcr_decode", "pcr_scan", "shards",
        "split_by_node", "split_scans", "stage",
    ]  # fmt: skip
    assert all(getattr(pcrshard, name) is not None for name in pcrshard.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pcrshard.nonsense
