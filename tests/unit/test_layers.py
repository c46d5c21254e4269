"""The one-way import graph, held by reading every import statement, lazy and type-checking ones
included.
"""

import ast

import pytest

from tests.import_graph import ROOT, files_that_import_torch, imports, modules, reachable_in

PACKAGE = ROOT / "torchtitan"
CORE = (
    *("utils", "config"),
    *("models", "parallel", "data", "optim"),
    *("checkpoint", "telemetry", "health", "inference", "train"),
)
BESIDE = ("testing", "tools", "commands", "__main__")
LAYERS = {name: layer for layer, name in enumerate((*CORE, *BESIDE))}
FILES = {name: path for name, path in modules().items() if path.is_relative_to(PACKAGE)}
GRAPH = {name: imports(path) & (FILES.keys() - {name}) for name, path in FILES.items()}
"""The package's modules that each of its modules imports."""


def layer(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of nodes that all reach one another."""
    reached = {name: reachable_in(graph, name) for name in graph}
    found = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(set, found), key=sorted)


def folder_graph() -> dict[str, set[str]]:
    """What each folder imports. A file beside folders is a node of its own, and so is a face."""
    crowded = {
        name.rpartition(".")[0] for name, path in FILES.items() if path.name == "__init__.py"
    }
    nodes = {}
    for name in FILES:
        folder = name.rpartition(".")[0]
        nodes[name] = name if folder in crowded else folder
    graph: dict[str, set[str]] = {node: set() for node in nodes.values()}
    for name, imported in GRAPH.items():
        graph[nodes[name]] |= {nodes[other] for other in imported} - {nodes[name]}
    del graph["torchtitan"]
    return {short(name): {short(x) for x in graph[name] & graph.keys()} for name in graph}


def short(name: str) -> str:
    return name.removeprefix("torchtitan.")


def test_imports_go_down():
    wrong = [
        f"{name} imports {other}"
        for name, imported in GRAPH.items()
        for other in imported
        if layer(name) and layer(other) and LAYERS[layer(other)] > LAYERS[layer(name)]
    ]
    assert wrong == []


def test_every_module_has_a_layer():
    """Guards the test above: a new folder must be given its place."""
    assert len(FILES) > 30
    assert sum(map(len, GRAPH.values())) > 100
    assert {layer(name) for name in FILES} - {None} == LAYERS.keys()


def test_no_modules_import_in_a_circle():
    graph = {short(name): set(map(short, imported)) for name, imported in GRAPH.items()}
    assert circles(graph) == []


def test_no_folder_imports_back():
    assert circles(folder_graph()) == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(graph) == [{"b", "c"}, {"e"}]


def test_unit_tests_of_torch_are_told_from_the_rest():
    names = {path.stem for path in files_that_import_torch(ROOT / "tests/unit")}
    assert {"test_model", "test_optimizer", "test_hf_export", "test_torch_faults"} <= names
    assert not {"test_layers", "test_command_line", "test_report_reading"} & names


def test_models_know_nothing_of_parallelism():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_config_imports_no_torch():
    for path in [*(PACKAGE / "config").rglob("*.py"), PACKAGE / "train" / "preflight.py"]:
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
    for path in (ROOT / folder).rglob("*.py"):
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
            path == PACKAGE / "utils/formats.py" and found == {"pickle.Unpickler", "torch.load"}
        ), path


def test_nothing_shipped_patches_as_tests_do():
    wrong = [
        name
        for name, path in FILES.items()
        if any(imported.split(".")[0] == "unittest" for imported in imports(path))
    ]
    assert wrong == []
