"""Stand-ins for modules that MindFormers imports and that cannot be had, so that the rest of it can be imported.

MindFormers 2.0 imports `hyper_parallel` (its PyNative trainer), which is on no public index; 1.3.2 imports MindSpore's `py_transforms`
(image augmentation), gone since. Neither takes part in converting weights or in building the networks used here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Open(type):
    """A class on which any public attribute is itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_Open):
    """May be derived from, made with any arguments and used as a decorator; does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(MetaPathFinder, Loader):
    """Finds the named modules and everything below them."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        wanted = any(fullname == name or fullname.startswith(name + ".") for name in self.names)
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    """From now on the modules `names` can be imported and hold nothing, where the real ones are not installed."""
    sys.meta_path.append(_Finder(frozenset(names)))
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = importlib.import_module(name)
        if parent and not hasattr(importlib.import_module(parent), leaf):
            setattr(importlib.import_module(parent), leaf, module)
