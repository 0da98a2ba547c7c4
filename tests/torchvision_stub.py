"""A stub in place of torchvision, for scripts that use timm in a process of their own."""

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every torchvision module is an object that has everything and does nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Never in pytest's own process."""
    sys.meta_path.insert(0, Stub())
