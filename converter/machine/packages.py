"""Installed Python packages, by their metadata; what MindSpore says of CANN, read from its source as data. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from converter.machine.facts import MindSpore
from converter.machine.system import System, read_small

CHECKED = (
    "click", "hccl", "mindformers", "mindspore", "ml_dtypes", "numpy", "packaging", "protobuf", "rich", "safetensors", "te", "tokenizers",
    "torch", "transformers", "xxhash",
)  # fmt: skip


def installed(system: System, mindspore: MindSpore | None) -> dict[str, str]:
    """Name to version of the packages that matter, MindSpore's requirements among them. The first on the search path counts."""
    needed = () if mindspore is None else (requirement.name for requirement in map(parsed, mindspore.requirements) if requirement)
    found = {}
    for name in dict.fromkeys((*CHECKED, *needed)):
        distribution = _find(system, name)
        if distribution is not None:
            found[name] = distribution.version
    return found


def read_mindspore(system: System) -> MindSpore | None:
    """The installed MindSpore, None if there is none."""
    distribution = _find(system, "mindspore")
    if distribution is None:
        return None
    folder = Path(str(distribution.locate_file("mindspore")))
    return MindSpore(
        version=distribution.version,
        folder=str(folder),
        requires_python=distribution.metadata["Requires-Python"],
        requirements=tuple(distribution.requires or ()),
        accepted_cann=accepted_cann(folder / "run_check" / "_check_version.py"),
        custom_ops_cann=_custom_ops_cann(folder / "lib" / "plugin" / "ascend" / "custom_ascendc_910b" / "version.info"),
    )


def parsed(requirement: str) -> Requirement | None:
    """A line of a package's requirements; None if it cannot be understood or is for an extra or another platform."""
    try:
        found = Requirement(requirement)
    except InvalidRequirement:
        return None
    return found if found.marker is None or found.marker.evaluate({"extra": ""}) else None


def _find(system: System, name: str) -> Distribution | None:
    found = distributions(name=name, path=[entry or str(system.folder) for entry in system.search_path])
    return next((distribution for distribution in found if distribution.metadata["Version"]), None)


def accepted_cann(source: Path) -> tuple[str, ...] | None:
    """The releases of CANN in MindSpore's own check, `self.version = ["8.2", ...]` in its `AscendEnvChecker`; None if it is not there."""
    content = read_small(source)
    try:
        tree = ast.parse(content or b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for brackets within brackets
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "AscendEnvChecker":
            return next(_version_lists(node), None)
    return None


def _version_lists(checker: ast.ClassDef) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(checker):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
            continue
        if any(isinstance(target, ast.Attribute) and target.attr == "version" for target in node.targets):
            items = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
            yield tuple(item for item in items if isinstance(item, str))


def _custom_ops_cann(file: Path) -> str | None:
    """The release of CANN in `custom_opp_compiler_version=9.1.0`."""
    text = (read_small(file) or b"").decode("utf-8", errors="replace")
    value = text.partition("=")[2].strip()
    return ".".join(value.split(".")[:2]) if value else None
