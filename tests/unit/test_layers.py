"""The one-way import graph, held by reading every import statement, lazy and type-checking ones
included.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "torchtitan"
CORE = (
    *("utils", "config"),
    *("models", "parallel", "data", "optim"),
    *("checkpoint", "telemetry", "health", "inference", "train"),
)
BESIDE = ("testing", "tools", "commands", "__main__")
LAYERS = {name: layer for layer, name in enumerate((*CORE, *BESIDE))}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of the modules a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def unit(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "torchtitan" and parts[1] in LAYERS else None


def own_unit(path: Path) -> str | None:
    return unit(".".join(("torchtitan", *path.relative_to(ROOT).with_suffix("").parts)))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own = own_unit(path)
    if own is None:
        assert path.name == "__init__.py"
        return
    for name in imports(path):
        other = unit(name)
        assert other is None or LAYERS[other] <= LAYERS[own], (
            f"{path.name} (layer {own}) imports {name}"
        )


def test_every_file_has_a_layer():
    """Guards the test above: a new folder must be given its place."""
    assert len(FILES) > 30
    assert {own_unit(path) for path in FILES} - {None} == set(LAYERS)


def test_models_know_nothing_of_parallelism():
    for path in (ROOT / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_files_of_data_import_one_way():
    """Not in circles: `CycleError` names one."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in FILES}
    inside = {name: path for name, path in names.items() if name.startswith("torchtitan.data.")}
    graph = {name: imports(path) & inside.keys() for name, path in inside.items()}
    assert sum(map(len, graph.values())) > 50
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("files", "above"),
    [
        ("checkpoint/*.py", r"torchtitan\.checkpoint\.hf"),
        ("telemetry/trackers/*.py", r"torchtitan\.telemetry\.(?!trackers)"),
    ],
)
def test_a_folder_and_its_subfolder_import_one_way(files, above):
    paths = list(ROOT.glob(files))
    assert paths
    for path in paths:
        assert not any(re.match(above, name) for name in imports(path)), path


def test_nothing_shipped_patches_as_tests_do():
    for path in FILES:
        assert not any(name.split(".")[0] == "unittest" for name in imports(path)), path


def test_config_imports_no_torch():
    for path in [*(ROOT / "config").rglob("*.py"), ROOT / "train" / "preflight.py"]:
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


RUNS_WHAT_IT_READS = {
    "eval",
    "exec",
    "compile",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.load",
    "torch.hub.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "marshal.loads",
    "marshal.load",
    "ast.literal_eval",
}


@pytest.mark.parametrize("folder", ["torchtitan", "benchmarks", "scripts"])
def test_nothing_that_is_read_is_run(folder):
    """Pickles are read in one place, which refuses whatever they name."""
    for path in (ROOT.parent / folder).rglob("*.py"):
        names = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        found = (names | calls) & RUNS_WHAT_IT_READS
        assert not found or (
            path == ROOT / "utils/formats.py" and found == {"pickle.Unpickler", "torch.load"}
        ), path


def test_files_of_models_import_no_circles():
    files = {}
    for path in FILES:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    models = {name for name in files if name.startswith("torchtitan.models.")}
    graph = {name: (imports(files[name]) & models) - {name} for name in models}
    assert sum(map(len, graph.values())) > len(graph), "imports are not found"
    TopologicalSorter(graph).prepare()  # which raises an error that names a circle
