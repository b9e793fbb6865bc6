"""`verify`: does a rank tree, or one file, hold what a Hugging Face folder holds, and do the two models compute the same?

Without a forward pass neither MindSpore nor Transformers is imported, and tensors are compared in blocks.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from converter import __version__
from converter.canonical import parameters_of_file, parameters_of_tree, whole_layout
from converter.compare import TensorDifference, WeightComparison, bytes_to_compare, compare_file, compare_weights
from converter.derived import check_not_carried
from converter.display import size
from converter.hf_folder import HFFolder, read_hf_folder
from converter.layout import ParallelLayout, cutting_of
from converter.manifest import MANIFEST
from converter.plan_report import fate_facts
from converter.rank_tree import RankTree, read_rank_tree
from converter.source_model import SourceModel, architecture_of, understand
from mappings.errors import Problem, Refused, refuse
from mappings.names import fold_names
from mappings.tables import FamilyTable, bundled_families, bundled_table, load_table
from model.config import ModelConfig
from model.parity import THRESHOLDS, Threshold, to_facts

SCHEMA_VERSION = 1
PACKAGES = ("numpy", "safetensors", "mindspore", "torch", "transformers", "tokenizers")
HALF = {"bf16": "bfloat16", "fp16": "float16"}
STORED = {"bf16": "BF16", "fp16": "F16"}
LONGEST = 200
FLOATS = {"F64", "F32", "F16", "BF16"}
ANOTHER_MODEL = "give the Hugging Face folder that it was made from, or `ms-convert inspect` either"


@dataclass(frozen=True)
class VerifyOptions:
    """What a user may choose. `generate` above 0 asks for a forward pass too."""

    forward: bool = False
    generate: int = 0
    rules: str | None = None
    workers: int = 2


@dataclass(frozen=True)
class Check:
    """One claim, and whether it holds."""

    name: str
    holds: bool
    summary: str


@dataclass(frozen=True)
class Sides:
    """What is compared: the folder as the table understands it, and a rank tree or (tree None) the file `target`."""

    source: SourceModel
    target: Path
    tree: RankTree | None
    notes: tuple[str, ...]

    @property
    def config(self) -> ModelConfig:
        """What the MindSpore side says the model is; a single file says nothing, so the folder's word stands."""
        return self.source.config if self.tree is None else self.tree.manifest.model

    @property
    def layout(self) -> ParallelLayout:
        return whole_layout(self.source) if self.tree is None else self.tree.layout

    @property
    def dtype(self) -> str:
        return "keep" if self.tree is None else self.tree.manifest.dtype


@dataclass(frozen=True)
class Verification:
    """The outcome. `facts` is what the terminal, the report and `--json` show; model/verify_schema.json describes it."""

    checks: tuple[Check, ...]
    facts: dict[str, Any]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


OnProgress = Callable[[int], None]
OnStep = Callable[[str], None]


def open_sides(model: Path, target: Path, rules: str | None = None) -> Sides:
    """Read both sides' headers. Raises Refused for what is no Hugging Face folder, no rank tree and no single file."""
    folder = read_hf_folder(model)
    tree = _read_target(target)
    table, note = _table(folder, tree, rules)
    if tree is not None:
        _check_class(folder, tree)
    source = understand(folder, table, None if tree is None else tree.manifest.model.tied)
    if tree is not None:
        _check_layers(source, tree)
        source = source.in_dialect(tree.dialect, cutting_of(tree.cut_for))
    notes = list(source.notes) + ([note] if note else [])
    if tree is not None and tree.table.text != source.table.text:
        notes.append(f"the rank tree was made with another rule table ({tree.table.where}) than it is verified with ({source.table.where})")
    return Sides(source, target, tree, tuple(notes))


def _check_class(folder: HFFolder, tree: RankTree) -> None:
    """Refuse a tree of another class before its word on tied embeddings is applied to the folder."""
    architecture = architecture_of(folder.config, str(folder.path / "config.json"))
    if architecture not in tree.table.architectures:
        what = f"it was made from a {tree.manifest.model.family} model, and {folder.path} is a {architecture}"
        raise Refused("the checkpoint is of another model", [Problem(what, str(tree.path), ANOTHER_MODEL)])


def _check_layers(source: SourceModel, tree: RankTree) -> None:
    """Refuse a tree with other layers: its layout gives the folder's no stage. What else differs is found by the checks."""
    layers = tree.manifest.model.layers
    if layers != source.config.layers:
        what = f"it has {layers} layers, and {source.folder.path} has {source.config.layers}"
        raise Refused("the checkpoint is of another model", [Problem(what, str(tree.path), ANOTHER_MODEL)])


def _read_target(target: Path) -> RankTree | None:
    if target.is_dir():
        return read_rank_tree(target)
    if not target.exists():
        raise refuse("no such file or folder", str(target), "give the output folder of hf2ms, or a .ckpt or .safetensors file")
    return None


def _table(folder: HFFolder, tree: RankTree | None, rules: str | None) -> tuple[FamilyTable | None, str]:
    """The user's table, else the bundled one, so that a tree made with a wrong table is found out; else the tree's own."""
    if rules is not None:
        return load_table(Path(rules)), ""
    architecture = architecture_of(folder.config, str(folder.path / "config.json"))
    served = {name for family in bundled_families() for name in bundled_table(family).architectures}
    if tree is None or architecture in served:
        return None, ""
    return tree.table, f"no bundled rule table serves {architecture}: verified with the one that the rank tree was made with"


def bytes_to_read(sides: Sides) -> int:
    """Bytes of all slices that are compared, for progress."""
    return bytes_to_compare(sides.source, sides.layout, sides.dtype)


def verify(
    sides: Sides,
    options: VerifyOptions,
    command: str = "",
    on_progress: OnProgress | None = None,
    on_step: OnStep = lambda _: None,
    on_compared: Callable[[], None] = lambda: None,
) -> Verification:
    """Every check, none skipped because another failed. Raises Refused for a file that cannot be read.

    `on_progress` is told of bytes compared, `on_compared` when all are, `on_step` what a forward pass is doing.
    """
    started = time.monotonic()
    if sides.tree is None:
        comparison = compare_file(sides.source, sides.target, options.workers, on_progress)
    else:
        comparison = compare_weights(sides.source, sides.tree, options.workers, on_progress)
    _put_in_order(comparison)
    compared = time.monotonic()
    on_compared()
    dtype = "keep" if sides.tree is None else sides.tree.manifest.dtype
    checks = [_coverage(sides, comparison), _not_carried(sides.source), _weights(comparison, dtype), *_description(sides)]
    forward = None
    if options.forward or options.generate:
        found, forward = _run_forward(sides, options, on_step)
        checks += found
    seconds = {"weights": round(compared - started, 3), "total": round(time.monotonic() - started, 3)}
    facts = _facts(sides, comparison, checks, forward, command, seconds)
    return Verification(tuple(checks), facts)


def _put_in_order(comparison: WeightComparison) -> None:
    """Differences in the order of the model and of the ranks; threads find them in any."""
    order = {holding.name: place for place, holding in enumerate(comparison.holdings)}
    files = {file: place for place, file in enumerate(dict.fromkeys(file for holding in comparison.holdings for file in holding.files))}
    comparison.differences.sort(key=lambda item: (order.get(item.name, len(order)), item.name, files.get(item.file, len(files)), item.file))


# --- checks -----------------------------------------------------------------------------------------------------------------------------


def _coverage(sides: Sides, comparison: WeightComparison) -> Check:
    wrong = [item for item in comparison.differences if item.what in ("missing", "unexpected")]
    if wrong:
        return Check("coverage", False, _some(list(_folded(wrong))))
    fates = Counter(fate.fate for fate in comparison.fates)
    counted = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()))
    files = len({file for holding in comparison.holdings for file in holding.files})
    parameters = f"{len(comparison.holdings)} parameters in {files} file{'' if files == 1 else 's'}"
    return Check("coverage", True, f"{len(comparison.fates)} tensors ({counted}) = {parameters}")


def _folded(wrong: list[TensorDifference]) -> Iterator[str]:
    """One phrase for all layers and all files that lack the same."""
    files: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in wrong:
        files[item.what, item.name].append(item.file)
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (what, name), places in files.items():
        names[what, _some(places, 2)].append(name)
    for (what, where), group in names.items():
        yield f"{what} in {where}: {', '.join(fold_names(group))}"


def _not_carried(source: SourceModel) -> Check:
    """Dropped buffers are what the config says, and duplicates repeat what they should."""
    try:
        check_not_carried(source)
    except Refused as refusal:
        return Check("not carried", False, _some([problem.what for problem in refusal.problems]))
    count = len(source.dropped) + len(source.duplicates)
    kind = "tensor is" if count == 1 else "tensors are"
    return Check("not carried", True, f"{count} derived or repeated {kind} what the config says" if count else "nothing was left out")


def _weights(comparison: WeightComparison, dtype: str) -> Check:
    wrong = [item for item in comparison.differences if item.what not in ("missing", "unexpected")]
    if not comparison.slices:
        return Check("weights", False, "no slice could be compared")
    if not wrong:
        equal = "every bit is equal" if dtype == "keep" else f"every bit is as the cast to {dtype} makes it"
        return Check("weights", True, f"{comparison.slices} slices, {size(comparison.bytes_compared)}: {equal}")
    count = f"{len(wrong)} slice{'s differ' if len(wrong) != 1 else ' differs'}"
    return Check("weights", False, f"{count}: {_some([_difference(item) for item in wrong])}")


def _difference(item: TensorDifference) -> str:
    if item.what != "other bits":
        return f"{item.name} in {item.file} is {item.what}"
    error = "" if item.max_relative_error is None else f", relative error up to {item.max_relative_error:.1e}"
    return f"{item.name} in {item.file} at {list(item.first_index)}{error}"


def _description(sides: Sides) -> Iterator[Check]:
    """A rank tree's own words about the model are those of the folder's config.json."""
    if sides.tree is None:
        return
    differing = description_differences(sides.source.config, sides.tree.manifest.model)
    if differing:
        texts = [f"{item['field']} is {item['source']!r} in the folder and {item['target']!r} in the manifest" for item in differing]
        yield Check("description", False, _some(texts))
    else:
        yield Check("description", True, f"{MANIFEST} describes the model as config.json does")


def description_differences(source: ModelConfig, target: ModelConfig) -> list[dict[str, Any]]:
    """Fields of the model in which the two differ; the padded vocabulary is the layout's business."""
    target = replace(target, padded_vocab=source.padded_vocab)
    names = [field.name for field in fields(ModelConfig) if getattr(source, field.name) != getattr(target, field.name)]
    return [{"field": name, "source": source.to_json()[name], "target": target.to_json()[name]} for name in names]


def threshold_for(sides: Sides) -> Threshold:
    """By what `--dtype` did to the weights: exact unless some float was narrowed or changed its exponent range."""
    stored = STORED.get(sides.dtype)
    narrowed = stored is not None and any(tensor.dtype in FLOATS - {stored} for tensor in sides.source.tensors.values())
    return THRESHOLDS[HALF[sides.dtype] if narrowed else "float32"]


def _run_forward(sides: Sides, options: VerifyOptions, on_step: OnStep) -> tuple[list[Check], dict[str, Any] | None]:
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's errors only; it reads this when it is imported
    try:
        from model.forward_parity import ForwardParity, compare_models
    except ModuleNotFoundError as error:
        mend = "pip install 'ms-convert[mindspore,hf]', or leave --forward out"
        raise refuse(f"a forward pass needs {error.name}, which is not installed", "", mend) from error

    def parameters() -> Any:
        return parameters_of_file(sides.target) if sides.tree is None else parameters_of_tree(sides.tree)

    try:
        parity: ForwardParity = compare_models(sides.source, sides.config, parameters, threshold_for(sides), options.generate, on_step)
    except Refused as refusal:
        return [Check("forward", False, f"could not be run: {refusal.title}: {_some([str(item) for item in refusal.problems])}")], None
    return list(_forward_checks(parity.to_facts())), parity.to_facts()


def _forward_checks(facts: dict[str, Any]) -> Iterator[Check]:
    limit = facts["threshold"]["relative_error"]
    first = facts["first_divergence"]
    if first is None:
        worst = max(facts["states"], key=lambda state: state["relative_error"])
        text = f"relative error at most {worst['relative_error']:.1e} ({worst['name']}, probe {worst['probe']}), {limit:.0e} allowed"
        yield Check("forward", True, f"{len(facts['states'])} states on {len(facts['probes'])} probes: {text}")
    else:
        error = float(first["relative_error"])
        text = f"diverges first at {first['name']}: relative error {error:.1e} (probe {first['probe']}), {limit:.0e} allowed"
        yield Check("forward", False, text)
    logits = [probe for probe in facts["probes"] if probe["logits"] is not None]
    if logits:
        yield _top1(logits, facts["threshold"]["top1"])
    if facts["rotary"] is not None:
        rotary = facts["rotary"]
        error = float(rotary["max_error"])
        off = f"off by {error:.1e} at position {rotary['worst_position']}" if error else "equal"
        yield Check("rotary", rotary["holds"], f"cosines and sines of {rotary['positions']} positions: {off}")
    if facts["continuation"] is not None:
        yield _continuation(facts["continuation"])


def _top1(probes: list[dict[str, Any]], wanted: float) -> Check:
    tokens = sum(probe["logits"]["tokens"] for probe in probes)
    share = sum(probe["logits"]["top1_agreement"] * probe["logits"]["tokens"] for probe in probes) / tokens
    ties = sum(probe["logits"]["top1_ties"] for probe in probes)
    tied = f" ({ties} of the rest are ties)" if ties else ""
    holds = share + ties / tokens >= wanted - 1e-12
    return Check("top-1", holds, f"{100 * share:.4g} % of {tokens} tokens agree{tied}, {100 * wanted:g} % wanted")


def _continuation(facts: dict[str, Any]) -> Check:
    place = facts["first_difference"]
    if place is None:
        return Check("generation", True, f"{len(facts['ours'])} greedy tokens are the same")
    margin = "" if facts["margin"] is None else f", where the reference prefers its own by {facts['margin']:.2g}"
    tie = ": a tie" if facts["tie"] else ""
    return Check("generation", facts["holds"], f"greedy tokens differ from number {place + 1} on{margin}{tie}")


def _some(texts: list[str], limit: int = 3) -> str:
    """The first few, each cut to a readable length."""
    more = f", and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(text if len(text) <= LONGEST else text[:LONGEST] + " ..." for text in texts[:limit]) + more


# --- facts ------------------------------------------------------------------------------------------------------------------------------


def _facts(
    sides: Sides, comparison: WeightComparison, checks: list[Check], forward: dict[str, Any] | None, command: str, seconds: dict[str, float]
) -> dict[str, Any]:
    failed = [check.name for check in checks if not check.holds]
    source = sides.source
    return {
        "schema_version": SCHEMA_VERSION,
        "holds": not failed,
        "failed": failed,
        "checks": to_facts(checks),
        "command": command,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "source": {
            "path": str(source.folder.path), "family": source.table.family, "table": source.table.where,
            "architecture": architecture_of(source.folder.config, ""), "files": len(source.folder.files),
            "tensors": len(source.tensors), "bytes": sum(file.size for file in source.folder.files),
            "parameters": sum(tensor.elements for name, tensor in source.tensors.items() if name in source.expansion.hf_shapes),
            "dtypes": dict(Counter(tensor.dtype for tensor in source.tensors.values())),
        },
        "target": _target_facts(sides),
        "model": sides.config.to_json(),
        "description_differences": description_differences(source.config, sides.config),
        "weights": comparison.to_facts(),
        **fate_facts(source, sides.layout),
        "forward": forward,
        "notes": list(sides.notes),
        "versions": {"ms-convert": __version__, "python": platform.python_version(), **_versions()},
        "platform": f"{platform.system()} {platform.machine()}",
        "seconds": seconds,
    }  # fmt: skip


def _target_facts(sides: Sides) -> dict[str, Any]:
    tree = sides.tree
    if tree is None:
        return {
            "path": str(sides.target), "kind": "file", "format": sides.target.suffix.removeprefix("."), "dtype": "keep", "layout": None,
            "files": 1, "bytes": sides.target.stat().st_size, "tool_version": None,
        }  # fmt: skip
    manifest = tree.manifest
    return {
        "path": str(tree.path), "kind": "rank_tree", "format": manifest.format, "dtype": manifest.dtype, "layout": tree.layout.to_json(),
        "files": len(manifest.files), "bytes": sum(file.size for file in manifest.files), "tool_version": manifest.tool_version,
    }  # fmt: skip


def _versions() -> dict[str, str]:
    """Of the packages that take part, without importing them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
