"""The shape of the code: who may import whom, what is shipped, what syntax is used."""

from __future__ import annotations

import ast
import configparser
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple, Set, Tuple

import pytest

from tests.programs import ROOT

PACKAGE = ROOT / "pjrt_compat"
# A room may import itself and the rooms to its right.
ROOMS = ("tools", "patching", "shims", "collectives", "replicas")
# Imported at interpreter start, before it is known whether torch_xla will be.
CORE = ("__init__", "bootstrap", "environ", "errors", "state")
SOURCES = sorted(PACKAGE.rglob("*.py"))
SHIPPED = [*SOURCES, ROOT / "sitecustomize_example.py"]


class Import(NamedTuple):
    module: str
    at_module_level: bool


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> List[Import]:
    """Every import that can happen at run time; those for type checkers only are left out."""
    return list(_imports(ast.parse(path.read_text()), at_module_level=True))


def _imports(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, at_module_level) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import of {}".format(node.module)
        # `from pjrt_compat import patching` names a room.
        names = ["{}.{}".format(node.module, alias.name) for alias in node.names]
        yield from (Import(name, at_module_level) for name in names)
    inside = at_module_level and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, inside)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "pjrt_compat" and len(parts) > 1 and parts[1] in ROOMS else ""


def test_rooms_import_only_what_lies_below_them() -> None:
    wrong: Set[Tuple[str, str]] = set()
    for path in SOURCES:
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ROOMS:
            continue
        allowed = ROOMS[ROOMS.index(room) :]
        for imported in imports_of(path):
            if room_of(imported.module) and room_of(imported.module) not in allowed:
                wrong.add((identifier(path), imported.module))
    assert not wrong


@pytest.mark.parametrize("name", CORE)
def test_what_is_imported_at_interpreter_start_needs_the_standard_library_only(name: str) -> None:
    def is_fine(module: str) -> bool:
        root, _, rest = module.partition(".")
        return root in sys.stdlib_module_names or (
            root == "pjrt_compat" and rest.partition(".")[0] in CORE
        )

    found = [i.module for i in imports_of(PACKAGE / (name + ".py")) if i.at_module_level]
    assert [module for module in found if not is_fine(module)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=identifier)
def test_the_syntax_is_python_3_8s(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


def test_no_except_catches_everything_without_saying_what() -> None:
    bare = [
        "{}:{}".format(identifier(path), node.lineno)
        for path in SHIPPED
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


def test_every_python_file_of_the_package_is_shipped() -> None:
    """Directories are packages, or their files are named in the package data."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["pjrt_compat"].split()
    data = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert len(data) == len(patterns)
    lost = [
        identifier(path)
        for path in SOURCES
        if path not in data and not (path.parent / "__init__.py").exists()
    ]
    assert not lost


def test_the_console_script_exists() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (line,) = setup["options.entry_points"]["console_scripts"].split("\n")[1:]
    module, _, function = line.partition("=")[2].strip().partition(":")
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert function in names


def test_the_two_sitecustomize_files_hand_over_in_the_same_way() -> None:
    """Neither may import the other, or anything of ours, before it has read the gate."""

    def handing_over(path: Path) -> str:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "_run_hidden_sitecustomize":
                return ast.dump(node)
        raise AssertionError("not in {}".format(path))

    example = ROOT / "sitecustomize_example.py"
    autoload = PACKAGE / "_autoload" / "sitecustomize.py"
    assert handing_over(example) == handing_over(autoload)
    for path in (example, autoload):
        level = {i.module for i in imports_of(path) if i.at_module_level}
        assert level == {"os", "sys"}
