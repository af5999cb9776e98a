"""Who may import whom, and what is public."""

import ast
import graphlib
import pathlib
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

# What each room may import of the package; six modules are free for all.
# A name with a dot is one module of a room.
FREE = {"arguments", "errors", "redaction", "memory", "checksum", "zstd"}
ROOMS = {
    "checksum": {"native"},
    "native": set(),
    "jpeg": {"native"},
    "format": {"jpeg.markers"},
    "storage": {"native"},
    "reading": {"storage", "format", "jpeg", "native"},
    "training": {"reading", "storage", "format", "jpeg", "native"},
    "encoding": {"storage", "format", "jpeg"},
    "upkeep": {"reading", "storage", "format", "jpeg", "encoding"},
    "fidelity": {"training", "reading", "storage", "format", "jpeg"},
    "integrations": {"training", "reading", "storage", "format", "jpeg", "native", "checkpoint"},
    "errorbound": set(),
    "checkpoint": {"errorbound", "native", "storage"},
    "simulation": {"training", "reading", "format", "jpeg"},
    "activation": {"errorbound", "native"},
    "testing": {"jpeg"},
}  # fmt: skip
# These see everything: the command line, the public names, the short name of an integration.
ABOVE = {"cli", "__init__", "hf"}
TORCH_FREE = {
    "native", "jpeg", "format", "storage", "reading", "encoding", "upkeep", "errors", "memory",
    "arguments", "checksum", "redaction", "zstd", "__init__", "testing",
}  # fmt: skip
# Each third-party package has one door; numpy and torch are vocabulary.
DOORS = {
    "aiohttp": {"storage.redirects"},
    "PIL": {"jpeg.other_formats", "testing"},
    "braceexpand": {"storage.urls"},
    "cffi": {"native.build_native"},
    "cv2": {"fidelity.msssim"},
    "datasets": {"integrations.huggingface"},
    "distributed": {"encoding.clusters"},
    "fsspec": {"storage.stores", "testing"},
    "matplotlib": {"fidelity.plots"},
    "msgpack": {"format.schema"},
    "msgspec": {
        "format.dataset_index",
        "encoding.resume_journal",
        "checkpoint.frame",
    },
    "sklearn": {"cli.demo"},
    "pcodec": {"errorbound.integer_codes"},
    "pyarrow": {"integrations.huggingface"},
    "ray": {"integrations.ray"},
    "safetensors": {"checkpoint.safetensors_file"},
    "simpy": {"simulation.epoch"},
    "submitit": {"encoding.clusters"},
    "tqdm": {"cli.progress"},
    "transformers": {"integrations.transformers_checkpoint"},
    "turbojpeg": {"jpeg.libjpeg_turbo"},
    "webdataset": {"integrations.webdataset"},
    "wrapt": {"__init__"},
    "zstandard": {"zstd"},
}
MAX_COLUMNS = 100
MAX_README_LINES = 90


def room_of(name: str) -> str:
    return name.partition(".")[0]


def imports(name: str):
    """(package, module) of every import, relative ones as the module's name in this package."""
    for node in run_time_nodes(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            package, _, module = node.module.partition(".")
            yield package, module or None
        elif isinstance(node, ast.ImportFrom):
            for target in relative_targets(name, node):
                yield "pcrshard", target


def run_time_nodes(tree: ast.AST):
    """Nodes that run: a name that is imported for its type only is no dependency."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from run_time_nodes(node)


def relative_targets(name: str, node: ast.ImportFrom) -> list[str]:
    folder = name.split(".")[: -node.level]
    base = ".".join([*folder, *(node.module.split(".") if node.module else [])])
    if base in MODULES:
        return [base]
    names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
    return [known for each in names if (known := as_module(each)) is not None]


def as_module(name: str) -> str | None:
    """The module of a dotted name, or ``None`` for a name inside of a package."""
    if name in MODULES:
        return name
    if f"{name}.__init__" in MODULES:
        return f"{name}.__init__"
    package = name.rpartition(".")[0]
    return f"{package}.__init__" if f"{package}.__init__" in MODULES else None


@pytest.mark.parametrize("name", MODULES)
def test_each_dependency_has_one_door(name):
    """A third-party package is imported by one module, so that it can be replaced there."""
    for package, _ in imports(name):
        if package in sys.stdlib_module_names or package in ("numpy", "pcrshard"):
            continue
        if package == "torch":
            assert room_of(name) not in TORCH_FREE, f"{name} imports torch"
        else:
            assert name in DOORS[package], f"{name} imports {package}: {sorted(DOORS[package])}"


@pytest.mark.parametrize("name", MODULES)
def test_rooms_import_only_what_the_table_allows(name):
    """The table above is the architecture: a room knows only the rooms in its row."""
    room = room_of(name)
    if room in ABOVE:
        return
    allowed = ROOMS.get(room, set())
    for package, target in imports(name):
        if package != "pcrshard" or target is None or room_of(target) in {room, *FREE}:
            continue
        assert target in allowed or room_of(target) in allowed, f"{name} imports {target}"


def test_there_are_no_import_circles():
    """The import graph has no cycles, so each module can be understood from its imports."""
    graph = {
        name: {t for package, t in imports(name) if package == "pcrshard" and t in MODULES}
        for name in MODULES
    }
    done = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for target in graph[name] - {name}:
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_python_is_read_without_scrolling():
    """A line of the package fits beside another file."""
    wide = [
        f"{name}:{number}"
        for name, path in MODULES.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []


def files(*patterns: str) -> list[pathlib.Path]:
    """Files of the project that match."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file()]


def prose_lines(text: str):
    """(number, line) of Markdown outside of code blocks, tables and pictures."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("|", "![")) and "https://" not in line:
            yield number, line


def test_markdown_is_read_without_scrolling():
    """Prose has 100 columns; tables and code blocks may need more."""
    pages = files("*.md", "docs/**/*.md")
    assert ROOT / "README.md" in pages
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in prose_lines(page.read_text())
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


C_FILES = files("pcrshard/native/src/*.[ch]", "pcrshard/native/*module.c", "fuzz/*.c")


def test_c_and_shell_are_read_without_scrolling():
    """The line limit holds in every language."""
    scripts = files("scripts/*", "scripts/slurm/*", "fuzz/*.sh", "conf/**/*.conf")
    assert C_FILES
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*C_FILES, *scripts]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []


def test_c_files_have_no_circle():
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
    graphlib.TopologicalSorter(calls).prepare()  # raises CycleError with the circle


def test_the_architecture_is_written_down():
    """CONTRIBUTING.md names every module, and has the table of imports that is enforced here."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    words = set(re.findall(r"\w+", tree))
    private = {"_on_import", "_version", "hf", "__init__"}
    assert {name.rpartition(".")[2] for name in MODULES} - private <= words
    table = dict(re.findall(r"^\| (\w+) \| (.+) \|$", text, re.MULTILINE))
    for room in {room_of(name) for name in MODULES} & ROOMS.keys():
        assert set(table[room].split(", ")) - {"nothing"} == ROOMS[room], room


def test_public_names_are_these():
    """What users import does not vanish or grow by accident."""
    assert sorted(pcrshard.__all__) == [
        "BandwidthTuner", "Buckets", "DatasetIndex", "DeltaStore", "EncodeOptions",
        "ImageDecoder", "JpegHandler", "PCRDataset", "PCRError", "PCRLoader", "PrefixCache",
        "ReadOptions", "Retry", "ScanLevel", "ScanTuner", "Shard", "ShardFormat", "ShardIndex",
        "ShardWriter",
        "View", "__version__", "compress_activations", "decode_image", "encode", "join_scans",
        "open_dataset", "pcr_decode", "pcr_scan", "shards",
        "split_by_node", "split_scans", "stage",
    ]  # fmt: skip
    assert all(getattr(pcrshard, name) is not None for name in pcrshard.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pcrshard.nonsense


def test_public_things_are_documented():
    """Every public function and class says what it is for."""
    for name, tree in TREES.items():
        for node in tree.body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            is_overload = "overload" in map(ast.unparse, getattr(node, "decorator_list", ()))
            if named and not is_overload:
                assert ast.get_docstring(node), f"{name}.{node.name}"
