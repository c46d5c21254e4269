"""What imports what, read from the import statements of the project's files.

`python -m tests.import_graph` prints the unit tests that a release of torch can break: those that
import it and test a package that computes or saves with it.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """The file of each module of the package and of its tests."""
    return {
        module_name(path): path
        for folder in ("torchtitan", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def import_statements(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements below a node.

    Args:
        lazy: also those in functions and for type checkers, which importing the module doesn't
            run.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif lazy or not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ):
            yield from import_statements(child, lazy=lazy)


@functools.cache
def imports(path: Path, *, lazy: bool = True) -> frozenset[str]:
    """Names of the modules that a file imports.

    `from a import b` names the module `a.b` if the project has one, and otherwise `a`; both if `a`
    isn't the project's.
    """
    names = set()
    for statement in import_statements(ast.parse(path.read_text()), lazy=lazy):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        else:
            assert statement.level == 0, f"{path}: relative import"
            attributes = {f"{statement.module}.{alias.name}" for alias in statement.names}
            names |= attributes & modules().keys()
            if statement.module not in modules():
                names |= attributes | {statement.module}
            elif not attributes <= modules().keys():
                names.add(statement.module)
    return frozenset(names)


def reachable_in(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    """The nodes that one or more edges lead to."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph.get(ahead.pop(), frozenset()) - reached
        reached |= new
        ahead += new
    return reached


def files_that_import_torch(folder: Path) -> list[Path]:
    """The test files that import torch, directly or not.

    A lazy import of the package doesn't count: it is of a feature that a test need not use.
    """
    graph = {name: imports(path, lazy=name.startswith("tests")) for name, path in modules().items()}
    return [
        path
        for path in sorted(folder.glob("test_*.py"))
        if {"torch", "torchao"}
        & {name.split(".")[0] for name in reachable_in(graph, module_name(path))}
    ]


NUMERIC = ("models", "parallel", "optim", "checkpoint", "train", "inference", "health", "tools")
"""Packages that compute or save with torch. The others hand its tensors on."""


def tests_a_package_of(path: Path, packages: Iterable[str]) -> bool:
    """Whether a file itself, or a helper that it imports, imports a module of these packages."""
    graph = {name: imports(file) for name, file in modules().items() if name.startswith("tests")}
    names = reachable_in(graph, module_name(path))
    return any(name.startswith(f"torchtitan.{package}") for name in names for package in packages)


if __name__ == "__main__":
    for path in files_that_import_torch(ROOT / "tests/unit"):
        if tests_a_package_of(path, NUMERIC):
            print(path.relative_to(ROOT))
