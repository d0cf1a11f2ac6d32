"""The structure of the package: no import cycles, no concrete parts in the protocol, real docstrings."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "thinwire"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
# the defaults of Method; all else that the protocol imports of parts are contracts
DEFAULTS = {
    "thinwire.aggregators.base",
    "thinwire.optimizers.corrections",
    "thinwire.optimizers.lr_schedules",
    "thinwire.optimizers.penalties",
    "thinwire.optimizers.base",
    "thinwire.spaces.base",
}
PARTS = ("aggregators", "codecs", "masks", "optimizers", "privacy", "schedules", "sketches", "spaces")


def imports_of(path: Path) -> Iterator[str]:
    """The modules of thinwire that a file imports, also in functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire"):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)


def test_there_is_no_import_cycle_types_included():
    graph = {module: {other for other in imports_of(path) if other != module} for module, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_protocol_imports_contracts_and_the_defaults_of_a_method_only():
    for path in (PACKAGE / "protocol").glob("*.py"):
        for module in imports_of(path):
            if module.split(".")[1] in PARTS and not module.endswith(".base"):
                assert module in DEFAULTS, f"{path.name} imports {module}"


def test_the_protocol_asks_for_no_types_of_parts():
    for path in (PACKAGE / "protocol").glob("*.py"):
        for call in re.findall(r"\b(?:isinstance|hasattr)\([^)]*\)", path.read_text()):
            assert "ClientStates" in call, f"{path.name}: {call}"


def test_docstrings_say_something():
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node)
                assert doc is None or len(doc.split()) > 1, f"{path.name}, {getattr(node, 'name', '')}: {doc}"


ROUND = {
    "protocol/round.py": ("downloads", "read", "close"),
    "protocol/receive.py": ("receive",),
    "protocol/client.py": ("training_inputs", "updates", "make_uploads"),
    "training/backends.py": ("train",),
    "training/cuda_graph.py": ("train",),
    "protocol/upload.py": ("decode_upload",),
    "protocol/server.py": ("aggregate", "next_version"),
}


@pytest.mark.parametrize(("name", "functions"), ROUND.items(), ids=str)
def test_functions_of_a_round_fit_a_screen(name, functions):
    tree = ast.parse((PACKAGE / name).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert {node.name for node in found} == set(functions)
    for node in found:
        documented = len((ast.get_docstring(node) or "").splitlines())
        assert node.end_lineno - node.lineno - documented < 50, node.name
        given = [one for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"]
        assert len(given) <= 7, node.name
