"""A Hugging Face folder understood: its family, its ModelConfig, and the fate of every tensor, with nothing missing and nothing guessed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from converter.hf_folder import HFFolder
from converter.tensors import StoredTensor
from mappings.composition import Cutting, compose
from mappings.config_values import shown
from mappings.dialect_table import Dialect
from mappings.errors import Problem, Refused, refuse
from mappings.expand import Expansion, expand, restore_prefix
from mappings.hf_config import read_model_config
from mappings.names import fold_names
from mappings.rules import Drop
from mappings.tables import FamilyTable, bundled_families, bundled_table, bundled_table_for
from model.config import ModelConfig

FP8 = {"F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True)
class SourceModel:
    """`tensors` by whole name (prefix restored); `dropped` and `duplicates` those that are there and not carried.

    `names` maps each name in the files to the whole name. `notes` are facts that a person should see. The parameters of `expansion` have
    the names of `dialect` (None: the canonical ones).
    """

    folder: HFFolder
    table: FamilyTable
    config: ModelConfig
    expansion: Expansion
    tensors: Mapping[str, StoredTensor]
    names: Mapping[str, str]
    dropped: Mapping[str, Drop]
    duplicates: Mapping[str, str]
    notes: tuple[str, ...]
    dialect: Dialect | None = None

    def in_dialect(self, dialect: Dialect | None, cutting: Cutting) -> SourceModel:
        """The same model, its parameters those of a dialect, cut so (None: the canonical ones). Raises Refused where that has no place."""
        if dialect is None:
            return self
        return replace(self, expansion=compose(self.expansion, dialect, cutting, self.table.family), dialect=dialect)


def find_table(config: Mapping[str, Any], where: str) -> FamilyTable:
    """The bundled table that serves the folder's architecture. Raises Refused, naming what is served."""
    architecture = architecture_of(config, where)
    found = bundled_table_for(architecture)
    if found is not None:
        return found
    served = ", ".join(name for family in bundled_families() for name in bundled_table(family).architectures)
    mend = f"served: {served}; for another family write a rule table and pass it with --rules FILE"
    raise refuse(f"no rule table serves the architecture {shown(architecture)}", where, mend)


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The single entry of `architectures`. Raises Refused when it is missing."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise refuse(
            f"'architectures' is {shown(names)}: it must name the model's one class",
            where,
            'write for example "architectures": ["LlamaForCausalLM"]',
        )
    return names[0]


def understand(folder: HFFolder, table: FamilyTable | None = None, tied: bool | None = None) -> SourceModel:
    """Account for every tensor of a folder. `tied` overrides the config's word on tied embeddings.

    Raises Refused with every missing, unexpected or misshapen tensor at once.
    """
    where = str(folder.path / "config.json")
    architecture = architecture_of(folder.config, where)
    if table is None:
        table = find_table(folder.config, where)
    elif architecture not in table.architectures:
        what = f"the table {table.where} serves {', '.join(table.architectures)}, not {architecture}"
        raise refuse(what, where, "name the architecture in the table, if its rules hold for it")
    names = restore_prefix(table, folder.tensors)
    tensors = _by_whole_name(folder, names)
    reading = read_model_config(
        folder.config, table.config, family=table.family, architecture=architecture,
        tensors={name: tensor.shape for name, tensor in tensors.items()}, where=where, vocab_rows=_vocabulary_rows(table, tensors),
        other_keys=table.config_keys,
    )  # fmt: skip
    config = replace(reading.config, tied=_decide_tied(folder, table, reading.config, tensors, tied))
    expansion = expand(table, config, folder.config, tensors)
    dropped = {name: drop for name, drop in expansion.drops.items() if name in tensors}
    duplicates = {name: of for name, of in expansion.duplicates.items() if name in tensors}
    problems = [*_presence(expansion, tensors), *_shapes(expansion, tensors), *_dtypes(folder, expansion, tensors)]
    if problems:
        raise Refused(f"{folder.path.name or folder.path} does not fit the table {table.where}", problems)
    return SourceModel(folder, table, config, expansion, tensors, names, dropped, duplicates, tuple(reading.notes))


def _by_whole_name(folder: HFFolder, names: Mapping[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name, tensor in folder.tensors.items():
        whole = names[name]
        if whole in tensors:
            problems.append(Problem(f"{whole!r} is there twice, with and without its prefix", str(tensor.path), "remove one of the two"))
        tensors[whole] = tensor
    if problems:
        raise Refused("two tensors have one name", problems)
    return tensors


def _vocabulary_rows(table: FamilyTable, tensors: Mapping[str, StoredTensor]) -> int | None:
    """Rows of the token embedding as it stands in the file; None when it is not there."""
    for rule in table.rules_with_role("embedding"):
        axes = [str(item) for item in rule.hf_axes.items]
        for name in rule.hf:
            if name in tensors and "vocab" in axes and len(tensors[name].shape) == len(axes):
                return tensors[name].shape[axes.index("vocab")]
    return None


def _decide_tied(
    folder: HFFolder, table: FamilyTable, config: ModelConfig, tensors: Mapping[str, StoredTensor], override: bool | None
) -> bool:
    """Whether head and embedding are one: the config's word, checked against the file; a contradiction is never guessed away."""
    heads = [rule for rule in table.rules_with_role("head") if table.holds(rule, replace(config, tied=False))]
    if override is not None or not heads:
        return bool(override and heads)
    absent = [rule.hf[0] for rule in heads if not any(name in tensors for name in rule.hf)]
    if absent and not config.tied:
        what = f"config.json says that the embeddings are not tied, yet no file holds {absent[0]!r}"
        raise refuse(what, str(folder.path), "if the head is the embedding, say --tie-embeddings; otherwise the folder is incomplete")
    return config.tied


def _presence(expansion: Expansion, tensors: Mapping[str, StoredTensor]) -> Iterable[Problem]:
    known = set(expansion.hf_names)
    missing = [name for name in expansion.hf_shapes if name not in tensors]
    unexpected = [name for name in tensors if name not in known]
    for name in fold_names(missing):
        yield Problem(f"missing: {name}", mend="download the folder again, or check that config.json is this model's")
    for name in fold_names(unexpected):
        yield Problem(
            f"unexpected: {name}",
            mend=f"no rule of {expansion.table.where} names it: add a rule, or a [[drop]] that says why it may be dropped (--rules)",
        )


def _shapes(expansion: Expansion, tensors: Mapping[str, StoredTensor]) -> Iterable[Problem]:
    wrong: dict[str, list[str]] = defaultdict(list)
    for pairing in expansion.pairings:
        stored, shape = tensors.get(pairing.hf), expansion.hf_shapes[pairing.hf]
        if stored is not None and stored.shape != shape:
            meaning = ", ".join(f"{atom} {expansion.sizes[atom]}" for atom in sorted(pairing.rule.hf_axes.all_atoms()))
            wrong[f"has the shape {list(stored.shape)}, the config says {list(shape)} = {pairing.rule.hf_axes} ({meaning})"].append(
                pairing.hf
            )
    for what, names in wrong.items():
        for name in fold_names(dict.fromkeys(names)):
            yield Problem(f"{name} {what}", mend="check that config.json is this model's")


def _dtypes(folder: HFFolder, expansion: Expansion, tensors: Mapping[str, StoredTensor]) -> Iterable[Problem]:
    fp8: dict[str, list[str]] = defaultdict(list)
    for name in expansion.hf_shapes:
        if name in tensors and tensors[name].dtype in FP8:
            fp8[tensors[name].dtype].append(name)
    for dtype, names in fp8.items():
        for name in fold_names(names):
            mend = "dequantise to bf16 first: block-scaled fp8 weights are not read"
            yield Problem(f"{name} is {dtype}", str(folder.path), mend)
