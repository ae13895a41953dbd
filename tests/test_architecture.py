"""The rules that keep the rooms apart; read from the imports, not from memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cbatch"

# Room -> the rooms of cbatch that it may import, in functions and for types, too. All rooms but those at the bottom may
# import the bottom.
BOTTOM = {"cbatch", "cbatch.errors", "cbatch.settings", "cbatch.config"}
MAY_IMPORT = {
    "cbatch.errors": set(),
    "cbatch.settings": {"cbatch.errors"},
    "cbatch.config": {"cbatch.errors", "cbatch.settings"},
    "cbatch.rows.request": {"cbatch.errors", "cbatch.config"},
    "cbatch.cli": {"cbatch.run", "cbatch.check", "cbatch.bench"},
    "cbatch.__main__": {"cbatch.cli", "cbatch.isolation", "cbatch.model.cache", "cbatch.streams"},
    "cbatch.isolation": set(),
    "cbatch.machine": {"cbatch.errors"},
    "cbatch.deadline": set(),
    "cbatch.failures": {"cbatch.watch.stats"},
    "cbatch.streams": set(),
    "cbatch.plan": {"cbatch.rows", "cbatch.output", "cbatch.engine.plan", "cbatch.model.loader"},
    "cbatch.run": {
        "cbatch.deadline",
        "cbatch.ending",
        "cbatch.failures",
        "cbatch.opening",
        "cbatch.streams",
        "cbatch.plan",
        "cbatch.rows",
        "cbatch.output",
        "cbatch.engine",
        "cbatch.model.loader",
        "cbatch.watch",
    },
    "cbatch.opening": {"cbatch.rows", "cbatch.engine"},
    "cbatch.ending": {
        "cbatch.deadline",
        "cbatch.machine",
        "cbatch.rows",
        "cbatch.output",
        "cbatch.engine",
        "cbatch.model.ceilings",
        "cbatch.watch",
    },
    "cbatch.check": {
        "cbatch.plan",
        "cbatch.rows",
        "cbatch.output",
        "cbatch.engine.estimate",
        "cbatch.engine.places",
        "cbatch.engine.plan",
        "cbatch.model.loader",
        "cbatch.watch.report",
    },
    "cbatch.bench": {
        "cbatch.isolation",
        "cbatch.machine",
        "cbatch.bench",
        "cbatch.rows",
        "cbatch.engine.places",
        "cbatch.engine.plan",
        "cbatch.model.loader",
        "cbatch.model.cache",
        "cbatch.model.ceilings",
        "cbatch.watch.progress",
    },
    "cbatch.rows": {"cbatch.rows"},
    "cbatch.output": {"cbatch.output", "cbatch.rows"},
    "cbatch.engine": {
        "cbatch.machine",
        "cbatch.engine",
        "cbatch.model",
        "cbatch.kernels.attention",
        "cbatch.rows.request",
        "cbatch.watch.stats",
        "cbatch.deadline",
    },
    "cbatch.model": {"cbatch.machine", "cbatch.model", "cbatch.kernels"},
    "cbatch.watch": {"cbatch.watch", "cbatch.rows.request", "cbatch.rows.remarks"},
    "cbatch.kernels": {"cbatch.kernels"},
}
NO_TORCH = [
    "errors.py",
    "settings.py",
    "config.py",
    "machine.py",
    "deadline.py",
    "streams.py",
    "isolation.py",
    "cli.py",
    "run.py",
    "opening.py",
    "ending.py",
    "plan.py",
    "check.py",
    "rows",
    "output",
    "watch",
    "bench",
    "engine/sequence.py",
    "engine/block_pool.py",
    "engine/scheduler.py",
    "engine/detokenizer.py",
    "engine/backlog.py",
    "engine/protocol.py",
    "engine/places.py",
    "engine/plan.py",
    "engine/recovery.py",
    "engine/replica.py",
    "engine/replica_child.py",
    "engine/replica_process.py",
    "engine/replicas.py",
    "model/fetch.py",
    "model/loader.py",
    "model/cache.py",
    "model/checkpoint.py",
    "model/gguf.py",
    "model/tokenizer_files.py",
    "model/weights.py",
]


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"] + sorted(
        (ROOT / "kernels").rglob("*.py")
    )


def name_of(path: Path) -> str:
    folder = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("cbatch", *folder) if folder[0] == "kernels" else folder)


def imports(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Imported names, dotted; those under `if TYPE_CHECKING` and those inside functions only if `everywhere`."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_for_types and not everywhere:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node, everywhere)


def within(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_dependencies_point_down(path: Path) -> None:
    room = max((r for r in MAY_IMPORT if within(name_of(path), {r})), key=len)
    known = {name_of(module) for module in modules()}
    used = {name for name in imports(ast.parse(path.read_text())) if name in known}
    bottom = set() if room in BOTTOM else BOTTOM
    allowed = {name for name in used if within(name, MAY_IMPORT[room] | {room}) or name in bottom}
    assert used == allowed


@pytest.mark.parametrize("place", NO_TORCH)
def test_no_torch_at_import(place: str) -> None:
    paths = [PACKAGE / place] if place.endswith(".py") else sorted((PACKAGE / place).glob("*.py"))
    assert paths
    for path in paths:
        found = {name.split(".")[0] for name in imports(ast.parse(path.read_text()), everywhere=False)}
        assert not found & {"torch", "transformers", "datasets", "triton"}, path


def test_only_one_file_asks_the_system_about_the_machine() -> None:
    """`kernels/` imports nothing of cbatch, so its compiler looks for itself which CPU it compiles for."""
    others = {"cbatch.bench.process"}  # reads in /proc how much memory other processes took: no fact about the machine
    for path in modules():
        if within(name_of(path), {"cbatch.kernels", "cbatch.machine", *others}):
            continue
        asks = r"\b(proc|sys)/|/(proc|sys)\b|sched_getaffinity|cpu_count|sysconf|mem_get_info|device_count"
        assert not re.search(asks, path.read_text()), path


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['cbatch', 'run', '--help']\n"
        "from cbatch.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_kernels_is_no_package_of_its_own() -> None:
    """Hugging Face has a package called kernels that transformers finds by name; ours must never be taken for it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    assert (PACKAGE / "kernels").is_symlink()
    assert (PACKAGE / "kernels").resolve() == ROOT / "kernels"
    for path in [*modules(), *sorted((ROOT / "tests").glob("*.py"))]:
        assert not {"kernels"} & {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}, path


def test_no_test_imports_from_another() -> None:
    """What several tests need lies in a module of its own beside them."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        found = {name for name in imports(ast.parse(path.read_text())) if name.startswith("tests.test_")}
        assert not found, path


def test_every_module_says_what_it_is() -> None:
    for path in modules():
        assert path.name == "__main__.py" or ast.get_docstring(ast.parse(path.read_text())), path


def test_files_hold_one_thing() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 420, path


def test_functions_fit_on_a_screen() -> None:
    """At most 60 lines, except Triton kernels, which can't call one another as cheaply."""
    for path in [*modules(), *sorted((ROOT / "tests").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                is_kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
                assert is_kernel or (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"
