"""A checkpoint that has no manifest understood: family and sizes from config.json, names and layouts from a dialect, nothing guessed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.chunked import ChunkedTensor, ForeignCheckpoint
from converter.hf_folder import MAX_CONFIG_BYTES, read_json_object
from converter.source_model import architecture_of, find_table
from mappings.composition import RANK_AXIS, Cutting, compose
from mappings.dialect_table import Dialect
from mappings.errors import Problem, Refused, refuse
from mappings.expand import Expansion, expand
from mappings.hf_config import read_model_config
from mappings.names import fill, fold_names, number_free
from mappings.parameters import Parameter
from mappings.tables import FamilyTable
from model.config import ModelConfig

MAX_PROBLEMS = 40


@dataclass(frozen=True)
class ForeignModel:
    """A model in a foreign checkpoint. `tensors` are those of `expansion`, whole, their vocabulary perhaps padded to `vocab_rows`.

    `ignored` are names that are no weights, by why. `fused_for` is the number of ranks that fused tensors are laid out for.
    """

    checkpoint: ForeignCheckpoint
    dialect: Dialect | None
    table: FamilyTable
    config: ModelConfig
    hf_config: dict[str, Any]
    canonical: Expansion
    expansion: Expansion
    tensors: Mapping[str, ChunkedTensor]
    ignored: Mapping[str, tuple[str, ...]]
    vocab_rows: int
    fused_for: int
    notes: tuple[str, ...]


def config_file(path: Path) -> Path:
    """The config.json that somebody names, or names the folder of."""
    return path / "config.json" if path.is_dir() else path


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face config.json, or the one in a folder."""
    place = config_file(path)
    if not place.is_file():
        raise refuse("no such file", str(place), "give the model's config.json with --config: it tells family and sizes")
    return read_json_object(place, MAX_CONFIG_BYTES, place.parent)


def understand_checkpoint(
    checkpoint: ForeignCheckpoint,
    dialect: Dialect | None,
    config_path: Path,
    cuts: Mapping[str, tuple[int, ...]] | None = None,
    fused_for: int | None = None,
) -> ForeignModel:
    """Account for every tensor of a checkpoint. `cuts`: into how many ranks' slices each tensor's axes are cut, where that is known;
    `fused_for`: the tp that fused tensors were laid out for, where it is not.

    Raises Refused with every missing, unexpected or misshapen tensor at once.
    """
    where, hf_config = str(config_path), read_config(config_path)
    architecture = architecture_of(hf_config, where)
    table = find_table(hf_config, where)
    tensors, ignored = _weights(checkpoint, dialect)
    reading = read_model_config(
        hf_config, table.config, family=table.family, architecture=architecture,
        tensors=_hf_names(table, dialect, tensors), where=where, other_keys=table.config_keys,
    )  # fmt: skip
    canonical = expand(table, reading.config, hf_config, ())
    expansion = compose(canonical, dialect, Cutting(), table.family)
    ranks = _fused_for(expansion, dialect, cuts, fused_for)
    _check_chunks_of_ranks(expansion, tensors, ranks)
    if ranks > 1:
        expansion = compose(canonical, dialect, Cutting(ranks, padded_vocabulary=True), table.family)
    rows = _vocabulary_rows(expansion, tensors, reading.config.vocab)
    problems = [*_presence(expansion, tensors, table), *_shapes(expansion, tensors, rows)]
    if problems:
        name = dialect or "canonical names"
        raise Refused(f"the checkpoint does not hold the model of {where} in {name}", problems[:MAX_PROBLEMS])
    notes = list(reading.notes)
    if rows != reading.config.vocab:
        notes.append(f"the vocabulary is padded to {rows} rows: the {reading.config.vocab} of config.json come back")
    return ForeignModel(
        checkpoint, dialect, table, reading.config, hf_config, canonical, expansion, tensors, ignored, rows, ranks, tuple(notes)
    )  # fmt: skip


def _weights(checkpoint: ForeignCheckpoint, dialect: Dialect | None) -> tuple[dict[str, ChunkedTensor], dict[str, tuple[str, ...]]]:
    """The tensors that are weights, and the names of the others by why they are none."""
    others: dict[str, list[str]] = defaultdict(list)
    weights = {}
    for why, names in checkpoint.ignored.items():
        others[why] += names
    for name, tensor in checkpoint.tensors.items():
        why_not = next((item.why for item in dialect.table.not_weights if item.names(name)), None) if dialect is not None else None
        if why_not is None:
            weights[name] = tensor
        else:
            others[why_not].append(name)
    return weights, {why: tuple(names) for why, names in others.items()}


def _hf_names(table: FamilyTable, dialect: Dialect | None, tensors: Iterable[str]) -> set[str]:
    """The names, of the first layer and expert, of the HF tensors whose values are there: [config] asks for some."""
    present = {number_free(name) for name in tensors}
    spelled = {} if dialect is None else {ms: tensor.name for tensor in dialect.tensors(table.family) for _, ms in tensor.ms}
    return {
        fill(rule.hf[0], layer=0, expert=0)
        for rule in table.rules
        if all(number_free(spelled.get(ms, ms) if dialect is None else spelled.get(ms, "")) in present for _, ms in rule.ms)
    }


def _fused_for(expansion: Expansion, dialect: Dialect | None, cuts: Mapping[str, tuple[int, ...]] | None, given: int | None) -> int:
    """How many ranks' pieces lie one after the other in fused tensors. Raises Refused where nothing says it."""
    fused = [item for item in expansion.parameters.values() if item.parameter.cut == RANK_AXIS]
    if not fused:
        return 1
    known = None if cuts is None else {cuts[item.name][item.parameter.cut_axis or 0] for item in fused if item.name in cuts}
    if known is None or not known:
        if given is None:
            what = f"{dialect} keeps each rank's part of {fused[0].parameter.name} together, and nothing says for how many ranks"
            raise refuse(what, mend="say --source-tp N: the tensor-parallel ranks of the run that wrote it")
        return given
    if len(known) > 1 or given not in (None, *known):
        raise refuse(
            f"fused tensors are cut for {' and for '.join(map(str, sorted(known)))} ranks", mend="give the strategy files of one run"
        )
    return known.pop()


def _check_chunks_of_ranks(expansion: Expansion, tensors: Mapping[str, ChunkedTensor], ranks: int) -> None:
    """Raises Refused where a chunk of a fused tensor would hold parts of several of this many ranks: no rank saves another's."""
    for item in expansion.parameters.values():
        if item.parameter.cut != RANK_AXIS or item.name not in tensors:
            continue
        places = len({chunk.start[item.parameter.cut_axis or 0] for chunk in tensors[item.name].chunks})
        if places > 1 and places % ranks:
            what = f"{item.name} lies in {places} pieces, which cannot be of {ranks} tensor-parallel ranks"
            raise refuse(what, str(tensors[item.name].chunks[0].stored.path), "say with --source-tp what the run had")


def vocabulary_axes(parameter: Parameter) -> list[int]:
    """The axes of a parameter that are the vocabulary."""
    return [axis for axis, item in enumerate(parameter.axes.items) if str(item) == "vocab"]


def _vocabulary_rows(expansion: Expansion, tensors: Mapping[str, ChunkedTensor], vocab: int) -> int:
    """The vocabulary as it is stored: padded, or as config.json has it."""
    rows = {
        tensors[item.name].shape[axis]
        for item in expansion.parameters.values()
        if item.name in tensors and item.parameter.role == "embedding"
        for axis in vocabulary_axes(item.parameter)
        if axis < len(tensors[item.name].shape)
    }
    return max(rows, default=vocab)


def _presence(expansion: Expansion, tensors: Mapping[str, ChunkedTensor], table: FamilyTable) -> Iterator[Problem]:
    for name in fold_names(name for name in expansion.parameters if name not in tensors):
        yield Problem(f"missing: {name}", mend="check that config.json is this model's, and that --from names its dialect and version")
    for name in fold_names(name for name in tensors if name not in expansion.parameters):
        yield Problem(f"unexpected: {name}", mend=f"no tensor of the family {table.family} in this dialect has that name")


def _shapes(expansion: Expansion, tensors: Mapping[str, ChunkedTensor], rows: int) -> Iterator[Problem]:
    wrong: dict[str, list[str]] = defaultdict(list)
    sizes = {**expansion.sizes, "vocab": rows}
    for item in expansion.parameters.values():
        shape = tensors[item.name].shape if item.name in tensors else item.shape
        padded = item.parameter.axes.shape(sizes) if rows >= expansion.sizes["vocab"] else item.shape
        if shape not in (item.shape, padded):
            wrong[f"has the shape {list(shape)}, config.json says {list(item.shape)} = {item.parameter.axes}"].append(item.name)
    for what, names in wrong.items():
        for name in fold_names(names):
            yield Problem(f"{name} {what}", mend="check that config.json is this model's")
