"""What a rule table says of tensors: the rule, the drop, the duplicate; and which of them contradict each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from mappings.axes import Axes
from mappings.names import placeholders

PLACEHOLDER_ATOM = {"expert": "experts"}


@dataclass(frozen=True)
class Rule:
    """The HF tensor `hf` (the first spelling that is in the file) holds, laid out as `hf_axes`, the canonical parameters `ms`.

    `ms` maps each label of `hf_axes` ("" for a tensor of a single part) to a parameter's name. The rule holds when all ModelConfig
    fields in `when` are true ("not x": false), for layers `from_layer` <= layer < `to_layer` (a number or a key of config.json).
    """

    hf: tuple[str, ...]
    hf_axes: Axes
    ms: tuple[tuple[str, str], ...]
    when: tuple[str, ...] = ()
    from_layer: int | str = 0
    to_layer: int | str | None = None

    @property
    def per_layer(self) -> bool:
        return "layer" in placeholders(self.hf[0])


@dataclass(frozen=True)
class Drop:
    """An HF tensor that is derived from the config: listed in the report, not carried and not restored. `check` recomputes it."""

    hf: str
    why: str
    check: str


@dataclass(frozen=True)
class Duplicate:
    """An HF tensor that some files hold a second time under another name; its bytes must equal those of `of`."""

    hf: str
    of: str


def contradictions(rules: Sequence[Rule], drops: Sequence[Drop], duplicates: Sequence[Duplicate]) -> Iterator[tuple[str, str]]:
    """What is wrong between the entries of a table, each with its mend: a tensor with two fates, a parameter written twice."""
    yield from _two_fates(rules, drops, duplicates)
    for duplicate in duplicates:
        if not any(duplicate.of in rule.hf for rule in rules):
            yield f"duplicate of {duplicate.of!r}, which no rule names", "let 'of' be the hf name of a rule"
    written: dict[str, list[Rule]] = defaultdict(list)
    for rule in rules:
        for _, ms in rule.ms:
            written[ms].append(rule)
    for ms, writers in written.items():
        if not _exclusive(writers):
            yield f"{ms!r} is written by {len(writers)} rules", "leave one out, or let 'when' or the layers tell them apart"


def _two_fates(rules: Sequence[Rule], drops: Sequence[Drop], duplicates: Sequence[Duplicate]) -> Iterator[tuple[str, str]]:
    named: dict[str, list[Rule | Drop | Duplicate]] = defaultdict(list)
    for rule in rules:
        for name in rule.hf:
            named[name].append(rule)
    for drop in drops:
        named[drop.hf].append(drop)
    for duplicate in duplicates:
        named[duplicate.hf].append(duplicate)
    for name, entries in named.items():
        of_rules = [entry for entry in entries if isinstance(entry, Rule)]
        if len(entries) > 1 and not (len(of_rules) == len(entries) and _exclusive(of_rules)):
            kinds = " and in a ".join(type(entry).__name__.lower() for entry in entries[:2])
            yield f"{name!r} stands in a {kinds}", "each hf tensor has one fate: leave one out"


def _exclusive(rules: Sequence[Rule]) -> bool:
    """Whether no two rules can hold for the same layer: opposite conditions, or layer ranges that differ (checked again on expansion)."""
    return all(
        _opposite(first, second) or (first.from_layer, first.to_layer) != (second.from_layer, second.to_layer)
        for first, second in combinations(rules, 2)
    )


def _opposite(first: Rule, second: Rule) -> bool:
    return any(_negated(condition) in second.when for condition in first.when)


def _negated(condition: str) -> str:
    return condition.removeprefix("not ") if condition.startswith("not ") else f"not {condition}"
