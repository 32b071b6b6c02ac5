"""Imports point one way, and target names stay in targets/ and templates/."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "deepinfer_compile"

# What each part may import of ours, besides itself. `diagnostics` is open to the whole compiler.
ALLOWED = {
    "diagnostics": set(),
    "format": set(),
    "ir": {"diagnostics", "format"},
    "spec": {"diagnostics"},
    "checkpoint": {"diagnostics", "spec"},
    "build": {"diagnostics", "ir", "spec"},
    "target": {"diagnostics", "format", "ir"},
    "passes": {"diagnostics", "format", "ir"},
    "plan": {"diagnostics", "format", "ir", "spec", "build", "target"},
    "emit": {"diagnostics", "format", "ir", "target", "plan", "version"},
    "oracle": {"build", "checkpoint", "format", "ir", "package", "spec"},
    "package": {"diagnostics", "format", "plan", "spec", "target", "checkpoint", "version"},
    "driver": {
        "diagnostics", "format", "ir", "spec", "checkpoint", "build", "target", "plan", "emit",
        "oracle", "package", "passes",
    },
    "opt": {"diagnostics", "driver", "ir", "passes"},
    "reduce": {"diagnostics", "format", "spec"},
    "report": {"build", "checkpoint", "format", "ir", "plan", "spec"},
    "commands": {
        "checkpoint", "diagnostics", "driver", "format", "passes", "plan", "report", "spec",
        "target",
    },
    "cli": {"commands", "diagnostics", "driver", "format", "spec", "version"},
    "__main__": {"cli"},
    "runtime": {"format", "version"},
}  # fmt: skip


def imported_modules(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names = {alias.name for alias in node.names}
            if node.module == "deepinfer_compile":
                found |= {f"deepinfer_compile.{name}" for name in names}
            else:
                found.add(node.module)
    return found


def part_of(module: str) -> str:
    part = module.split(".")[1]
    return "version" if part == "__version__" else part


def files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("file", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    ours = {m for m in imported_modules(file) if m.split(".")[0] == "deepinfer_compile"}
    assert {part_of(m) for m in ours} - {own} <= ALLOWED[own]


def test_nobody_imports_a_target():
    for file in files():
        assert not {m for m in imported_modules(file) if m.startswith("deepinfer_targets")}, file


def test_targets_import_the_plug_in_interface_only():
    for file in sorted((REPO / "targets").rglob("*.py")):
        ours = {m for m in imported_modules(file) if m.split(".")[0] == "deepinfer_compile"}
        assert {part_of(m) for m in ours} <= {"target", "ir", "format", "diagnostics"}, file


def test_the_compiler_never_imports_the_runtime():
    for file in files():
        if file.relative_to(PACKAGE).parts[0] != "runtime":
            imports = imported_modules(file)
            assert not {m for m in imports if m.startswith("deepinfer_compile.runtime")}, file


def test_the_environment_is_read_in_two_places():
    allowed = {PACKAGE / "spec/load.py", PACKAGE / "runtime/settings.py"}
    for file in [*files(), *sorted((REPO / "targets").rglob("*.py"))]:
        text = file.read_text()
        if file not in allowed:
            assert "os.environ" not in text, file
            assert "getenv" not in text, file


@pytest.mark.parametrize("name", ["sm90", "sm100", "sm103"])
def test_target_names_stay_with_the_targets(name):
    for file in files():
        assert name not in file.read_text(), file
