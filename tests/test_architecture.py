"""The layers of CONTRIBUTING.md: a folder is a layer, and imports only folders that stand above it in `LAYERS`.

The checks read the source text of `asyncdist`, of the transports and of the benchmarks. Imports below ``TYPE_CHECKING``
and inside functions count like any other import.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch.distributed
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    "base", "net", "store", "kernel.algorithms", "kernel.memory", "kernel.transport", "kernel.tracing",
    "kernel.membership", "kernel.engine", "kernel.collectives", "kernel.devices", "kernel", "rendezvous", "weights",
    "status", "groups", "elastic", "ddp", "rpc", "torch_backend", "cli",
)  # fmt: skip
"""The folders of `asyncdist`; each imports only itself, the folders before it, and the modules of `FOUNDATION`."""

FOUNDATION = {"asyncdist.config", "asyncdist.environment", "asyncdist.errors"}
"""Flat modules that every folder may import; they import no folder but `base`."""

PRIVATE_NAMES = {"asyncdist.kernel.torch_private", "asyncdist.kernel.c10d_private"}
"""The only modules that name private parts of torch. Every folder that uses tensors may import them."""

SURFACE = {"asyncdist", "asyncdist.sync", "asyncdist.torchrun"}
"""The public surface: flat modules that lazily import from any layer. Only `cli` may import them."""

PURE_FOLDERS = (
    "asyncdist.net.detector", "asyncdist.net.connection.frames", "asyncdist.kernel.algorithms",
    "asyncdist.kernel.membership", "asyncdist.store.protocol", "asyncdist.store.state",
)  # fmt: skip
"""Folders and modules without I/O, clocks, threads and tensors: their modules import none of `IMPURE`."""

IMPURE = {"asyncio", "socket", "threading", "os", "select", "subprocess", "torch", "numpy", "multiprocessing"}

TRANSPORTS_MAY_IMPORT = (
    "base", "net", "kernel.memory", "kernel.transport", "kernel.algorithms.schedule", "kernel.algorithms.tree",
    "kernel.engine.work", "config", "environment", "errors",
)  # fmt: skip
"""What a transport sees of `asyncdist`: the contract, and what the contract speaks about."""

NO_TORCH = ("asyncdist.base", "asyncdist.net", "asyncdist.store")

LIBRARIES = ("weights", "status", "elastic", "ddp", "rpc", "torch_backend")
"""Folders that see of those in `CONTRACTS` what their ``__init__`` exports."""

CONTRACTS = ("kernel", "net", "store", "rendezvous", "groups")

DEEPER: set[str] = {
    "asyncdist.kernel.engine.work",
    "asyncdist.kernel.memory.registered",
    "asyncdist.kernel.memory.serialization",
    "asyncdist.kernel.tracing.desync_report",
    "asyncdist.kernel.tracing.plotting",
    "asyncdist.kernel.tracing.job_status",
    "asyncdist.kernel.tracing.recorder",
    "asyncdist.kernel.tracing.trace_record",
    "asyncdist.rendezvous.record_store",
    "asyncdist.rendezvous.sources",
    "asyncdist.store.base",
    "asyncdist.store.client.connect",
    "asyncdist.store.protocol.operations",
}
"""Modules behind a contract that libraries import nevertheless. This list only shrinks."""

MOST_PRIVATE_USES_IN_TESTS = 71
"""How often tests use or import private names that asyncdist defines, except their own. This only shrinks."""
OTHER_INTERFACES = (
    DistributedDataParallel, ProcessGroup, nn.Linear(1, 1), torch.Tensor, torch.distributed, torch.cuda,
    torch.distributed.distributed_c10d, namedtuple("Named", []),
)  # fmt: skip
"""Classes and modules of torch and Python, whose private names do not count, although our classes have them too."""

MOST_FLAT_MODULES = 6
MOST_MODULES_IN_A_FOLDER = 15
MOST_LINES_IN_A_FILE = 500
MOST_LINES_IN_A_FUNCTION = 60


def modules(folder: str) -> dict[str, Path]:
    """Return the modules below a folder of the checkout, by dotted name."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to((ROOT / folder).parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


PRODUCT = modules("asyncdist")
TRANSPORTS = modules("transports/asyncdist_transports")
LIBRARY = {name: path for name, path in PRODUCT.items() if not name.startswith("asyncdist.testing")}
EVERYTHING = {**PRODUCT, **TRANSPORTS, **modules("benchmarks")}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(autouse=True, scope="module")
def _forget_nodes() -> Iterator[None]:
    """Drop the millions of nodes, which the garbage collector would look at during all later tests."""
    yield
    nodes.cache_clear()


@functools.cache
def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, as dotted names."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in EVERYTHING else node.module


def layer_of(module: str) -> int | None:
    """Return a module's place in `LAYERS`; None for a flat module."""
    _, *parts = module.split(".")
    found = [LAYERS.index(name) for name in (".".join(parts[:2]), ".".join(parts[:1])) if name in LAYERS]
    return found[0] if found else None


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def for_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a check of each module: a thousand tests take longer than their checks."""

    def decorate(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            for name in names:
                check(name)

        test.__doc__ = check.__doc__
        return test

    return decorate


@for_each(LIBRARY)
def test_module_imports_only_layers_above_it(name: str) -> None:
    layer = layer_of(name)
    if layer is None:
        assert name in FOUNDATION | SURFACE, f"{name} is in no layer: move it into a folder of LAYERS"
        if name in FOUNDATION:
            wrong = [each for each in imports(LIBRARY[name]) if (layer_of(each) or 0) > 0 or each in SURFACE]
            assert not wrong, f"{name} imports {wrong}"
        return
    for imported in imports(LIBRARY[name]):
        assert not is_below(imported, "asyncdist_transports"), f"{name} imports {imported}: use an entry point"
        if is_below(imported, "asyncdist") and imported not in FOUNDATION | PRIVATE_NAMES:
            other = layer_of(imported)
            if other is None:
                assert LAYERS[layer] == "cli", f"{name} imports {imported}, which is the public surface"
            else:
                assert other <= layer, f"{name} imports {imported}, which stands below it in LAYERS"


@for_each([name for name in LIBRARY if name.startswith(PURE_FOLDERS)])
def test_pure_module_imports_nothing_impure(name: str) -> None:
    wrong = [imported for imported in imports(LIBRARY[name]) if imported.split(".")[0] in IMPURE]
    assert not wrong, f"{name} has to stay without I/O, and imports {wrong}"


@for_each([name for name in LIBRARY if name.startswith(NO_TORCH)])
def test_folders_below_the_kernel_run_without_torch(name: str) -> None:
    assert "torch" not in {imported.split(".")[0] for imported in imports(LIBRARY[name])}, name
    assert not PRIVATE_NAMES & set(imports(LIBRARY[name])), name


def private_names_of_torch(path: Path) -> set[str]:
    """Return the names below ``torch`` that have a part with a leading underscore, and are imported or read in a file."""
    bound: dict[str, str | None] = {}
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            start, *rest = ast.unparse(node).split(".")
            # Not the attributes of what a call returns.
            if start in bound and all(map(str.isidentifier, rest)):
                found.add(".".join([bound[start] or start, *rest]))
    return {
        name
        for name in found
        if is_below(name, "torch")
        # Not private by its name, but where most of torch's private functions and their state are.
        and (is_below(name, "torch.distributed.distributed_c10d") or re.search(r"\._(?!_)", name))
    }


@for_each(EVERYTHING)
def test_only_two_modules_name_private_parts_of_torch(name: str) -> None:
    found = private_names_of_torch(EVERYTHING[name])
    if name in PRIVATE_NAMES:
        assert {each for each in imports(EVERYTHING[name]) if is_below(each, "asyncdist")} == set()
    else:
        assert not found, f"{name}: name them in asyncdist/kernel/torch_private.py or c10d_private.py, with the reason"


def test_libraries_import_only_what_contracts_export() -> None:
    behind = tuple(f"asyncdist.{contract}." for contract in CONTRACTS)
    libraries = tuple(f"asyncdist.{library}" for library in LIBRARIES)
    found = {
        imported
        for name, path in LIBRARY.items()
        for imported in imports(path)
        if name.startswith(libraries) and imported.startswith(behind) and imported not in PRIVATE_NAMES
    }
    assert found - DEEPER == set(), "import these names from the contract, or export them there"
    assert DEEPER - found == set(), "remove what no library imports any more"


@for_each(TRANSPORTS)
def test_transports_see_only_the_contract(name: str) -> None:
    for imported in imports(TRANSPORTS[name]):
        if is_below(imported, "asyncdist"):
            allowed = any(is_below(imported, f"asyncdist.{part}") for part in TRANSPORTS_MAY_IMPORT)
            assert allowed, f"{name} imports {imported}"


def test_no_import_cycles() -> None:
    """No module reaches itself over imports, those for annotations included; packages' ``__init__`` re-export."""
    graph = {
        name: {each for each in imports(path) if each in EVERYTHING and each != name}
        for name, path in EVERYTHING.items()
    }
    # The package loads its public names, except the version, on first use.
    graph.pop("asyncdist")
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in sorted(graph.get(name, ())):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_folders_stay_small() -> None:
    flat = [name for name in PRODUCT if name.count(".") == 1 and PRODUCT[name].name != "__init__.py"]
    assert len(flat) <= MOST_FLAT_MODULES, f"too many flat modules: {sorted(flat)}"
    for folder in {path.parent for path in EVERYTHING.values()}:
        count = sum(path.parent == folder and path.name != "__init__.py" for path in EVERYTHING.values())
        assert count <= MOST_MODULES_IN_A_FOLDER, f"{folder.relative_to(ROOT)} has {count} modules"


def lines_of_docstring(node: ast.AST) -> int:
    """Return the number of lines of the docstring of a function or a class; 0 for another node."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return 0


def test_files_and_functions_stay_small() -> None:
    """Docstrings do not count, because they are the reference of the functions and classes."""
    for path in EVERYTHING.values():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        lines -= sum(map(lines_of_docstring, nodes(path)))
        assert lines <= MOST_LINES_IN_A_FILE, f"{path.relative_to(ROOT)} has {lines} lines: does it hold one concept?"
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = node.body[0]
                documented = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
                start = doc.end_lineno if documented else node.lineno
                lines = (node.end_lineno or node.lineno) - (start or node.lineno) + 1
                assert lines <= MOST_LINES_IN_A_FUNCTION, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_class_names_are_unique() -> None:
    """One name means one class, but for the two that torch.distributed names itself."""
    where: dict[str, list[str]] = {}
    for name, path in EVERYTHING.items():
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    shared = {name: places for name, places in where.items() if len(places) > 1 and name not in ("Store", "Work")}
    assert not shared


def test_only_two_modules_read_the_environment() -> None:
    for name, path in LIBRARY.items():
        reads = any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes(path))
        reading = {"asyncdist.config", "asyncdist.environment"}
        assert not reads or name in reading, f"{name} reads the environment: add a setting to config"


def test_locks_of_modules_are_new_in_forked_children() -> None:
    """Of modules and classes: those of objects belong to their classes' own handling of a fork."""
    kinds = [f"threading.{kind}" for kind in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event")]
    found, kept = [], []
    for name, path in {**LIBRARY, **TRANSPORTS}.items():
        source = path.read_text(encoding="utf-8")
        module = nodes(path)[0]
        scopes = [node for node in nodes(path) if isinstance(node, ast.Module | ast.ClassDef)]
        for scope in scopes:
            for statement in scope.body:
                if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Call):
                    continue
                kind = ast.unparse(statement.value.func)
                if kind not in kinds:
                    continue
                target = ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
                found.append(target)
                if scope is not module or f'lifecycle.renew_in_children(globals(), "{target}", {kind})' not in source:
                    kept.append(f"{name}.{target}")
    assert found
    assert kept == []


def test_tests_use_few_private_names() -> None:
    own = {name for path in EVERYTHING.values() for node in nodes(path) for name in names_defined_by(node)}
    of_others = {name for kind in OTHER_INTERFACES for name in dir(kind)}
    private = {name for name in own - of_others if name.startswith("_") and not name.startswith("__")}
    used = []
    for path in modules("tests").values():
        text = path.read_text(encoding="utf-8")
        mentioned = {*re.findall(r"(?<!self)(?<!cls)\.(_\w+)", text)}
        mentioned |= {*re.findall(r"\b_\w+", " ".join(re.findall(r"(?s:import \(.*?\))|import .*", text)))}
        for node in () if private.isdisjoint(mentioned) else ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
                names = [] if of_itself else [node.attr]
            else:
                names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
            used += [f"{path.relative_to(ROOT)}: {name}" for name in names if name in private]
    assert len(used) <= MOST_PRIVATE_USES_IN_TESTS, used


def names_defined_by(node: ast.AST) -> list[str]:
    """Return the names and attributes that a node of a syntax tree defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.attr if isinstance(node, ast.Attribute) else node.id]
    return []


def test_library_neither_prints_nor_exits() -> None:
    for name, path in LIBRARY.items():
        if name.startswith("asyncdist.cli"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{name} calls {node.func.id}()"


def test_no_module_without_a_concept() -> None:
    for path in EVERYTHING.values():
        assert path.stem not in {"utils", "util", "common", "helpers", "misc"}, path


def test_foundation_needs_the_standard_library_only() -> None:
    for name in FOUNDATION:
        tops = {imported.split(".")[0] for imported in imports(PRODUCT[name])}
        assert tops <= sys.stdlib_module_names | {"asyncdist", "__future__"}, f"{name} imports {tops}"


def test_both_packages_say_that_they_are_typed() -> None:
    for package in ("asyncdist", "transports/asyncdist_transports"):
        assert (ROOT / package / "py.typed").is_file()
