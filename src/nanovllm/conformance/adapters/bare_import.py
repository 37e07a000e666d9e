"""Imports a few modules of an engine without what their package would import.

`sequence`, `block_manager` and `scheduler` plan in plain Python; the `__init__` of their package
brings in the model, and with it torch, CUDA and a tokenizer.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HEAVY = ("torch", "transformers", "flash_attn", "triton", "tqdm", "safetensors")
"""Libraries that are not needed in order to plan; `stand_ins=[...]` overrides."""

MODULES = ("sequence", "block_manager", "scheduler")


class _Nothing:
    """Stands in for a class or a function of a heavy library."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves the function as it is.
        return args[0] if args else self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds and loads the libraries of `names`, and whatever is imported from inside them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def find_engine(root: Path) -> Path:
    """The uppermost folder in or under `root` that has a block manager and a sequence."""
    folders = [
        file.parent
        for file in root.rglob("block_manager.py")
        if (file.parent / "sequence.py").exists()
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    if not folders:
        raise FileNotFoundError(f"no block_manager.py beside a sequence.py in or under {root}")
    return min(folders, key=lambda folder: (len(folder.parts), folder))


def package_of(folder: Path) -> str:
    """Dotted name of the folder, as its modules call it when they import one another."""
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                package, _, module = (node.module or "").rpartition(".")
                if module in MODULES:
                    return package
    # Relative imports work under any name.
    return "subject.engine"


def import_engine(root: Path, stand_ins: Iterable[str]) -> SimpleNamespace:
    """The modules of `MODULES`, None for a scheduler that is not there. Their packages become bare
    ones, so that no `__init__` runs."""
    folder = find_engine(root)
    package = package_of(folder)
    parts = package.split(".") if package else []
    upwards = [folder, *folder.parents]
    for depth in range(1, len(parts) + 1):
        bare = types.ModuleType(".".join(parts[:depth]))
        bare.__path__ = [str(upwards[len(parts) - depth])]
        sys.modules[bare.__name__] = bare
    sys.path.insert(0, str(upwards[len(parts)]))
    sys.meta_path.insert(0, _StandIns(stand_ins))
    modules = SimpleNamespace(name=root.name)
    for name in MODULES:
        exists = (folder / f"{name}.py").exists()
        module = importlib.import_module(".".join([*parts, name])) if exists else None
        setattr(modules, name, module)
    return modules
