"""Joining a family's rules with a dialect's table: the same Hugging Face tensors, paired with the dialect's tensors instead.

Nothing lies between: for each part, the layouts on both sides are refined to common axes, so that their views pair directly.
A tensor whose parts each begin with their own cut (`[q: heads head_dim | k: kv_heads head_dim]`) is sliced first and fused after: every
rank holds [q_r; k_r; v_r]. The whole tensor is then what MindSpore's tools make of the ranks' slices, one after the other, so that it
depends on how many there are: `(@rank [q: heads@rank head_dim | k: kv_heads@rank head_dim])`. No table can name these axes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mappings.axes import REFINEMENTS, Axes, Parts, Refinements
from mappings.dialect_table import Dialect, DialectTensor, per_rank, place_of_cut
from mappings.errors import Problem, Refused
from mappings.expand import Expansion, Pairing, ParameterOfModel
from mappings.names import fill, fold_names
from mappings.parameters import REPLICATED, Parameter

RANK_AXIS = "@rank"
MAX_PROBLEMS = 20


def of_rank(atom: str) -> str:
    """A rank's share of an axis, which no table can name."""
    return f"{atom}{RANK_AXIS}"


@dataclass(frozen=True)
class Cutting:
    """Into how many pieces tensors are cut, and whether the vocabulary was padded for it."""

    tp: int = 1
    padded_vocabulary: bool = False


def compose(expansion: Expansion, dialect: Dialect | None, cutting: Cutting, family: str) -> Expansion:
    """The expansion of the same model with the dialect's tensors as its parameters; None leaves the canonical ones.

    Raises Refused, naming every parameter that has no place in the dialect, and every tensor that has only some of its parts or
    cannot be cut so.
    """
    if dialect is None:
        return expansion
    _check_sizes(expansion, dialect, family)
    tensors = {ms: (tensor, label) for tensor in dialect.tensors(family) for label, ms in tensor.ms}
    used = _used(expansion, tensors, dialect, family)
    cut = {tensor.name: _cut(tensor, expansion, cutting) for tensor in used}
    sizes, refinements = _shares(used, expansion, cutting)
    composed = Expansion(
        expansion.table,
        sizes,
        hf_shapes=expansion.hf_shapes,
        drops=expansion.drops,
        duplicates=expansion.duplicates,
        refinements=refinements,
    )
    for pairing in expansion.pairings:
        item = expansion.parameters[pairing.ms]
        tensor, label = tensors[item.parameter.name]
        name = fill(tensor.name, layer=item.layer)
        composed.pairings.append(Pairing(pairing.hf, name, pairing.rule, pairing.label, pairing.expert, label))
        if name not in composed.parameters:
            parameter = cut[tensor.name]
            composed.parameters[name] = ParameterOfModel(name, parameter, parameter.axes.shape(sizes), item.layer)
    return composed


def _check_sizes(expansion: Expansion, dialect: Dialect, family: str) -> None:
    """Raises Refused for a model whose sizes the dialect's network cannot have."""
    problems = []
    for atom, axes in dialect.network(family).sizes:
        size, needed = expansion.sizes[atom], math.prod(axes.shape(expansion.sizes))
        if size != needed:
            meaning = " x ".join(f"{name} ({expansion.sizes[name]})" for name in axes.atoms())
            problems.append(Problem(f"its network has {atom} = {meaning}, this model has {atom} {size}", dialect.table.where))
    if problems:
        raise Refused(f"this model cannot be written as {dialect}", problems)


def _used(
    expansion: Expansion, tensors: Mapping[str, tuple[DialectTensor, str]], dialect: Dialect, family: str
) -> tuple[DialectTensor, ...]:
    """The dialect's tensors that this model has."""
    patterns: dict[str, list[str]] = defaultdict(list)
    for item in expansion.parameters.values():
        patterns[item.parameter.name].append(item.name)
    wrong: dict[str, list[str]] = defaultdict(list)
    for pattern, names in patterns.items():
        if pattern not in tensors:
            wrong[f"has no place in {dialect}: its network for {family} lacks such a parameter"] += names
    used = dict.fromkeys(tensors[pattern][0] for pattern in patterns if pattern in tensors)
    for tensor in used:
        lacking = [ms for _, ms in tensor.ms if ms not in patterns]
        if lacking:
            wrong[f"is only a part of {tensor.name}, which needs {', '.join(lacking)} too"] += [ms for _, ms in tensor.ms if ms in patterns]
    problems = [Problem(f"{name} {what}", dialect.table.where) for what, names in wrong.items() for name in fold_names(names)]
    if problems:
        raise Refused(f"this model cannot be written as {dialect}", problems[:MAX_PROBLEMS])
    return tuple(used)


def _cut(tensor: DialectTensor, expansion: Expansion, cutting: Cutting) -> Parameter:
    """The tensor as a parameter of this model: its layout with the ranks' axis, and what cuts it."""
    place = place_of_cut(tensor)
    axes, cut = tensor.axes, REPLICATED
    if place is not None and not tensor.replicated:
        item = axes.items[place.axis]
        if place.by:
            cut = place.by
        elif isinstance(item, Parts):
            renamed = {parameter.cut: of_rank(parameter.cut) for parameter in tensor.parameters}
            axes = Axes((*axes.items[: place.axis], per_rank(item, RANK_AXIS, renamed), *axes.items[place.axis + 1 :]))
            cut = RANK_AXIS
    if "vocab" in axes.all_atoms():
        cut = _vocabulary_cut(tensor, cut, expansion.sizes["vocab"], cutting)
    return Parameter(tensor.name, axes, cut, tensor.stage, tensor.role)


def _vocabulary_cut(tensor: DialectTensor, cut: str, vocab: int, cutting: Cutting) -> str:
    if cutting.padded_vocabulary and cut != "vocab":
        problem = Problem(f"{tensor.name} is whole on every rank and cannot be padded", mend="leave --vocab-multiple out")
        raise Refused("the vocabulary cannot be padded", [problem])
    if cut != "vocab" or cutting.padded_vocabulary or vocab % cutting.tp == 0:
        return cut
    if tensor.uneven:
        return REPLICATED
    mend = f"say --vocab-multiple {cutting.tp} to pad it (and let the trainer's vocab_size be the padded size), or choose another --tp"
    problem = Problem(f"{tensor.name}: a vocabulary of {vocab} cannot be divided among {cutting.tp} tensor-parallel ranks", mend=mend)
    raise Refused("the vocabulary cannot be cut", [problem])


def _shares(used: tuple[DialectTensor, ...], expansion: Expansion, cutting: Cutting) -> tuple[dict[str, int], Refinements]:
    """The sizes and refinements with those of a rank's share of each axis that a fused tensor is cut by."""
    cuttable = [(tensor, place_of_cut(tensor)) for tensor in used if not tensor.replicated]
    fused = [tensor for tensor, place in cuttable if place is not None and not place.by]
    shared = sorted({parameter.cut for tensor in fused for parameter in tensor.parameters})
    sizes, refinements = dict(expansion.sizes), dict(REFINEMENTS)
    if not shared:
        return sizes, refinements
    if "heads" in shared:
        shared = sorted({*shared, "kv_heads"})
    uneven = [atom for atom in shared if sizes[atom] % cutting.tp]
    if uneven:
        what = [Problem(f"{sizes[atom]} {atom} cannot be divided among {cutting.tp} tensor-parallel ranks") for atom in uneven]
        raise Refused("fused tensors cannot be cut so", what)
    sizes[RANK_AXIS] = cutting.tp
    for atom in shared:
        sizes[of_rank(atom)] = sizes[atom] // cutting.tp
        if atom in REFINEMENTS:
            first, *rest = REFINEMENTS[atom]
            refinements[of_rank(atom)] = (of_rank(first), *rest)
        else:
            refinements[atom] = (RANK_AXIS, of_rank(atom))
    assert all(sizes[atom] == math.prod(sizes[part] for part in parts) for atom, parts in refinements.items() if atom.endswith(RANK_AXIS))
    return sizes, refinements
