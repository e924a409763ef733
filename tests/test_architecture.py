"""The layers of CONTRIBUTING.md, held by a test: who may import whom, what stays pure, how large a file may grow."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each layer imports only lower ones and, without cycles, its own. A name stands for a module or for a whole package.
LAYERS: list[list[str]] = [
    ["errors", "ops", "deadline", "config"],
    ["framing", "handshake", "topology", "store.messages", "store.state", "store.entries", "store.queues",
     "store.pieces", "store.ties", "store.operations", "store.changes", "store.c10d_wire", "store.conversation",
     "store.log", "collectives.schedule", "collectives.cost", "collectives.ring", "collectives.tree",
     "collectives.doubling", "collectives.pairwise", "collectives.choose", "collectives.hierarchy", "ddp.buckets"],
    ["transport", "registry", "buffers", "objects", "reduce", "work", "runtime", "errands", "progress", "machine",
     "mismatch", "notices", "lifetime", "reminders", "interfaces", "arena", "inbox", "native", "registered", "bell",
     "lookout", "home", "descriptors", "idle", "tls", "compiling"],
    ["store", "observe", "mesh", "ways", "comparison", "collectives.executor", "collectives.operation", "collectives.plans",
     "collectives.islands", "collectives.reductions", "collectives.sparse", "collectives.exchanges",
     "collectives.arguments"],
    ["rendezvous", "calls", "devices", "group", "world"],
    ["api", "face", "aio", "sync"],
    ["ddp", "sampler", "torch_backend", "torchrun"],
    ["cli", "bench"],
]  # fmt: skip

PURE = {"asyncio", "socket", "threading", "os", "select", "subprocess", "torch", "numpy", "multiprocessing"}
TRANSPORTS_MAY_IMPORT = {
    "transport", "native", "errors", "deadline", "framing", "buffers", "arena", "reduce", "config", "handshake", "tls",
    "interfaces", "ops", "collectives.schedule", "devices.ensemble", "devices.staged", "devices.streams",
    "devices.courier", "work", "lifetime", "descriptors",
}  # fmt: skip


def modules(folder: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path, package: str) -> Iterator[str]:
    """Yield the modules of ``package`` that a file imports at run time, and other top-level names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(n) for block in ast.walk(tree) if _for_types_only(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == package or node.module.startswith(f"{package}."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def layer_of(module: str) -> int | None:
    """Return the layer of the longest name in LAYERS that the module lies under."""
    best: tuple[int, int] | None = None
    for number, names in enumerate(LAYERS):
        for name in names:
            if (module == name or module.startswith(f"{name}.")) and (best is None or len(name) > best[0]):
                best = (len(name), number)
    return None if best is None else best[1]


OURS = [(name, path) for name, path in modules("asyncdist") if name and not name.startswith("testing")]


@pytest.mark.parametrize(("name", "path"), OURS, ids=[name for name, _ in OURS])
def test_imports_go_down(name: str, path: Path) -> None:
    layer = layer_of(name)
    if layer is None:
        assert name == "collectives", f"asyncdist/{name} stands in no layer: add it to LAYERS"
        return
    for imported in imports(path, "asyncdist"):
        if imported.startswith("asyncdist_transports"):
            pytest.fail(f"{name} imports {imported}: transports are found through entry points only")
        if imported.startswith("asyncdist."):
            theirs = layer_of(imported.removeprefix("asyncdist."))
            assert theirs is None or theirs <= layer, f"{name} (layer {layer}) imports {imported} (layer {theirs})"
        if layer == 0:
            top = imported.split(".")[0]
            assert top in sys.stdlib_module_names | {"asyncdist", "__future__"}, f"{name} imports {imported}"
        if layer == 1:
            assert imported.split(".")[0] not in PURE, f"{name} is pure, and imports {imported}"


TRANSPORTS = list(modules("transports/asyncdist_transports"))


@pytest.mark.parametrize(("name", "path"), TRANSPORTS, ids=[name or "asyncdist_transports" for name, _ in TRANSPORTS])
def test_transports_see_only_the_contract(name: str, path: Path) -> None:
    for imported in imports(path, "asyncdist"):
        if imported.startswith("asyncdist."):
            module = imported.removeprefix("asyncdist.")
            allowed = any(module == known or module.startswith(f"{known}.") for known in TRANSPORTS_MAY_IMPORT)
            assert allowed, f"{name} imports {imported}"


def test_only_config_reads_the_environment() -> None:
    for name, path in OURS:
        reads = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
        ]
        assert not reads or name == "config", f"{name} reads the environment: that is config's"


def test_files_stay_small() -> None:
    for folder in ("asyncdist", "transports"):
        for _, path in modules(folder):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: split it by concept"


def test_functions_stay_small() -> None:
    for folder in ("asyncdist", "transports"):
        for _, path in modules(folder):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    assert lines <= 60, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_nothing_prints_or_exits_in_the_library() -> None:
    for name, path in OURS:
        if name.split(".")[0] in ("cli", "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{name} calls {node.func.id}()"


def test_no_room_without_a_concept() -> None:
    for _, path in [*modules("asyncdist"), *modules("transports")]:
        assert path.stem not in {"utils", "util", "common", "helpers", "misc"}, path
