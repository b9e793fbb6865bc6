"""Rules on versions: Python, its packages, and what MindSpore and CANN say of each other."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from converter.doctor.cann_facts import MINDFORMERS_MINDSPORE, MINDSPORE_CANN, needs_of
from converter.doctor.rule import Case, Rules, Sight
from converter.machine.facts import MindSpore
from converter.machine.packages import parsed

RULES = Rules()
OWN_NEEDS = {"mindspore": ">=2.7,<3", "torch": ">=2.6", "transformers": ">=4.51"}
"""What ms-convert's own optional dependencies are (pyproject.toml)."""
BUILT_WITH_NUMPY_1 = "<2.11"
CONTRADICTION = "The two vendors contradict each other: MindSpore {mindspore} wants {name}{wanted}. Keep what MindSpore wants."


def fits(version: str | None, wanted: str) -> bool:
    """Whether a version is within a specifier such as >=2.7,<3; also true where one of them is not known or not understood."""
    try:
        return version is None or SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return True  # not understood: nothing is claimed


@RULES.rule(
    "python-mindspore", "error", source="Requires-Python of the installed mindspore",
    why="pip: ERROR: Package 'mindspore' requires a different Python; by hand: ImportError: ... _c_expression",
)  # fmt: skip
def _python_mindspore(case: Case) -> Iterator[Sight]:
    mindspore = case.machine.mindspore
    if mindspore and mindspore.requires_python and not fits(case.machine.python, mindspore.requires_python):
        yield Sight(f"Python {case.machine.python}", f"Python {mindspore.requires_python} for MindSpore {mindspore.version}")


@RULES.rule(
    "python-cann", "warning", source="CANN installation guide, instg_0045",
    why="CANN's compiler runs in this Python: ModuleNotFoundError, or a crash, when the first operator is compiled",
)  # fmt: skip
def _python_cann(case: Case) -> Iterator[Sight]:
    cann, needs = case.machine.cann, needs_of(case.machine.cann.release if case.machine.cann else None)
    if cann and needs and needs.python and not fits(case.machine.python, needs.python):
        yield Sight(f"Python {case.machine.python}", f"Python {needs.python} for CANN {cann.version}")


@RULES.rule(
    "mindspore-requirements", "error", source="Requires-Dist of the installed mindspore",
    why="import mindspore: ModuleNotFoundError, ImportError; protobuf: VersionError: Detected incompatible Protobuf versions",
)  # fmt: skip
def _mindspore_requirements(case: Case) -> Iterator[Sight]:
    mindspore = case.machine.mindspore
    for requirement in (parsed(line) for line in (mindspore.requirements if mindspore else ())):
        if requirement is None or mindspore is None:
            continue
        version = case.machine.packages.get(requirement.name)
        if version is None or not fits(version, str(requirement.specifier)):
            seen = f"{requirement.name} {version}" if version else f"no {requirement.name}"
            yield Sight(seen, f"{requirement} for MindSpore {mindspore.version}", f"pip install '{requirement}'")


@RULES.rule(
    "numpy-2", "error", source="seen with MindSpore 2.10.0 and numpy 2",
    why="at the first operator: A module that was compiled using NumPy 1.x cannot be run in NumPy 2.x as it may crash",
)  # fmt: skip
def _numpy_2(case: Case) -> Iterator[Sight]:
    mindspore, numpy = case.machine.mindspore, case.machine.packages.get("numpy")
    if mindspore and numpy and fits(mindspore.version, BUILT_WITH_NUMPY_1) and not fits(numpy, "<2"):
        yield Sight(f"numpy {numpy}", f"numpy 1.x for MindSpore {mindspore.version}", "pip install 'numpy>=1.25,<2'")


@RULES.rule(
    "numpy-cann", "warning", source="CANN installation guide, instg_0045",
    why="CANN's Python tools fail when an operator is compiled: AttributeError: module 'numpy' has no attribute ...",
)  # fmt: skip
def _numpy_cann(case: Case) -> Iterator[Sight]:
    yield from _package_of_cann(case, "numpy")


@RULES.rule(
    "protobuf-cann", "warning", source="CANN installation guide, instg_0045; Requires-Dist of the installed mindspore",
    why="CANN's Python tools: TypeError: Descriptors cannot be created directly. With 3.20 MindSpore fails: it wants a newer one",
)  # fmt: skip
def _protobuf_cann(case: Case) -> Iterator[Sight]:
    yield from _package_of_cann(case, "protobuf")


def _package_of_cann(case: Case, name: str) -> Iterator[Sight]:
    """A package that CANN's guide wants otherwise. Where MindSpore's wish excludes CANN's, the finding says whom to follow."""
    cann, version = case.machine.cann, case.machine.packages.get(name)
    needs = needs_of(cann.release if cann else None)
    wanted = {"numpy": needs.numpy, "protobuf": needs.protobuf}[name] if needs else ""
    if cann is None or not wanted or version is None or fits(version, wanted):
        return
    mindspore = case.machine.mindspore
    own = _wish_of_mindspore(mindspore, name)
    mend = f"pip install '{name}{wanted}'"
    if mindspore and own is not None and not _compatible(own, wanted):
        mend = CONTRADICTION.format(mindspore=mindspore.version, name=name, wanted=own)
    yield Sight(f"{name} {version}", f"{name}{wanted} for CANN {cann.version}", mend)


def _compatible(one: str, other: str) -> bool:
    """Whether a version fits both. Both are bounds on one interval: if any version fits, the largest of the lower bounds does."""
    bounds = [Version(part.version.removesuffix(".*")) for part in (*SpecifierSet(one), *SpecifierSet(other))]
    return any(fits(str(bound), one) and fits(str(bound), other) for bound in bounds)


def _wish_of_mindspore(mindspore: MindSpore | None, name: str) -> str | None:
    requirements = (parsed(line) for line in (mindspore.requirements if mindspore else ()))
    return next((str(requirement.specifier) for requirement in requirements if requirement and requirement.name == name), None)


@RULES.rule(
    "cann-version", "error", source="run_check/_check_version.py of the installed mindspore",
    why="MindSpore version ... and Ascend AI software package (Ascend Data Center Solution)version ... does not match, the version of "
    "software package expect one of ...; then undefined symbols or failing operators",
)  # fmt: skip
def _cann_version(case: Case) -> Iterator[Sight]:
    cann, mindspore = case.machine.cann, case.machine.mindspore
    if cann and cann.release and mindspore and mindspore.accepted_cann and cann.release not in mindspore.accepted_cann:
        wanted = f"CANN {', '.join(mindspore.accepted_cann)} (MindSpore {mindspore.version}'s own list)"
        yield Sight(f"CANN {cann.version} in {cann.home}", wanted, "install one of these, and source its set_env.sh")


@RULES.rule(
    "cann-list", "warning", source="run_check/_check_version.py of the installed mindspore",
    why="nobody has checked whether MindSpore and CANN fit",
)  # fmt: skip
def _cann_list(case: Case) -> Iterator[Sight]:
    mindspore = case.machine.mindspore
    if case.machine.cann and mindspore and not mindspore.accepted_cann:
        published = dict(MINDSPORE_CANN).get(mindspore.version)
        wanted = f"CANN {published}, published with it" if published else "a release that MindSpore's installation page names"
        if case.machine.cann.release != published:
            seen = f"CANN {case.machine.cann.version}, and no list of CANN versions in MindSpore {mindspore.version}"
            yield Sight(seen, wanted, "see https://www.mindspore.cn/install")


@RULES.rule(
    "mindformers-mindspore", "warning", source="version tables of MindFormers",
    why="ImportError or AttributeError when MindFormers is imported: it is written for one MindSpore",
)  # fmt: skip
def _mindformers(case: Case) -> Iterator[Sight]:
    version, mindspore = case.machine.packages.get("mindformers"), case.machine.mindspore
    wanted = dict(MINDFORMERS_MINDSPORE).get(version or "")
    if mindspore and wanted and not fits(mindspore.version, f"=={wanted}"):
        yield Sight(
            f"MindFormers {version} with MindSpore {mindspore.version}", f"MindSpore {wanted}", "install a pair that belongs together"
        )


@RULES.rule(
    "custom-ops-version", "warning", source="check_custom_version in the installed mindspore",
    why="The version ... used for compiling the custom operator does not match Ascend AI software package version ... in the current "
    "environment",
)  # fmt: skip
def _custom_ops(case: Case) -> Iterator[Sight]:
    cann, mindspore = case.machine.cann, case.machine.mindspore
    if not (cann and cann.release and mindspore and mindspore.custom_ops_cann) or cann.release == mindspore.custom_ops_cann:
        return
    if cann.release in (mindspore.accepted_cann or ()):  # else there is a graver finding
        wanted = f"CANN {mindspore.custom_ops_cann}, which MindSpore {mindspore.version}'s own operators were built with"
        yield Sight(f"CANN {cann.version}", wanted, "nothing, unless a custom operator fails")


@RULES.rule(
    "own-requirements", "warning", source="pyproject.toml",
    why="`verify --forward`, training or reading .bin weights is refused, or runs untested",
)  # fmt: skip
def _own_requirements(case: Case) -> Iterator[Sight]:
    for name, wanted in OWN_NEEDS.items():
        version = case.machine.packages.get(name)
        if version is not None and not fits(version, wanted):
            yield Sight(f"{name} {version}", f"{name}{wanted}", f"pip install '{name}{wanted}'")


@RULES.rule(
    "safetensors-views", "warning", source="safetensors 0.8.0 with MindSpore 2.10.0: ms.transform_checkpoints wrote 8 of 38 tensors wrong",
    why="no error: MindSpore's own resharding to safetensors writes wrong numbers (slices of axis 1). ms-convert does not use that writer",
)  # fmt: skip
def _safetensors_views(case: Case) -> Iterator[Sight]:
    version = case.machine.packages.get("safetensors")
    if case.machine.mindspore and version == "0.8.0":
        mend = "reshard with ms-convert, or pip install 'safetensors<0.8' (transformers 5.18 and later want 0.8)"
        yield Sight("safetensors 0.8.0", "another version, if ms.transform_checkpoints is to write safetensors", mend)


@RULES.rule(
    "nnae-and-toolkit", "error", source="MindSpore FAQ, installation",
    why="MindSpore before 2.4.0 loads libraries of both and fails: undefined symbol, or error code of HCCL",
)  # fmt: skip
def _nnae_and_toolkit(case: Case) -> Iterator[Sight]:
    mindspore = case.machine.mindspore
    if mindspore and len(case.machine.cann_folders) > 1 and not fits(mindspore.version, ">=2.4.0"):
        yield Sight(f"{' and '.join(case.machine.cann_folders)}, MindSpore {mindspore.version}", "one of them, or MindSpore 2.4.0 or later")


@RULES.rule(
    "te-stale", "error", source="MindSpore FAQ, installation",
    why="[json.exception.parse_error.101] parse error at line 1, column 1: syntax error while parsing value",
)  # fmt: skip
def _te_stale(case: Case) -> Iterator[Sight]:
    """Wheels of CANN's in this Python's own packages: an old installation's, which the new one does not replace."""
    cann = case.machine.cann
    for name in ("te", "hccl"):
        version = case.machine.packages.get(name)
        if version is not None and cann and cann.release and ".".join(version.split(".")[:2]) != cann.release:
            yield Sight(f"{name} {version} beside CANN {cann.version}", f"{name} of CANN {cann.release}, or none", f"pip uninstall {name}")


@RULES.rule(
    "mindspore-shadow", "error", source="MindSpore FAQ, installation", why="ModuleNotFoundError: No module named 'mindspore.version'",
)  # fmt: skip
def _shadow(case: Case) -> Iterator[Sight]:
    for name in case.machine.shadows if case.machine.mindspore else ():
        yield Sight(f"{name} in the working directory", "another name, or another working directory", f"mv {name} my_{name}")


@RULES.rule(
    "env-protobuf-cpp", "warning", source="_set_pb_env in the installed mindspore",
    why="MemoryError or `Failed to parse the checkpoint file` when a large .ckpt is loaded by MindSpore. ms-convert does not use protobuf",
)  # fmt: skip
def _protobuf_cpp(case: Case) -> Iterator[Sight]:
    name = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    if case.machine.environment.get(name) == "cpp":
        yield Sight(f"{name}=cpp", "python", f"export {name}=python", name)


@RULES.rule(
    "libgomp", "warning", source="check_version_and_env_config in the installed mindspore",
    why="Pre-Load Library libgomp.so.1 failed, which might cause TLS memory allocation failure: cannot allocate memory in static TLS block",
)  # fmt: skip
def _libgomp(case: Case) -> Iterator[Sight]:
    if case.machine.mindspore and not case.machine.has_libgomp:
        yield Sight("no libgomp.so.1 where the loader looks", "GNU's OpenMP library", "install libgomp1 (Debian) or libgomp (openEuler)")
