"""The communication that the compiler put in, as a Markdown table: `python -m tests.semi_auto.communication_table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.semi_auto.cases import CASES, Case
from tests.semi_auto.compiling import Communication
from tests.semi_auto.golden import read_golden

HEADINGS = (
    "case", "forward, a layer", "backward, a layer", "embedding, forward", "loss, forward", "between stages",
    "gradients and weights, a step",
)  # fmt: skip


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each case, of the first and last stage together; all but the last column for each micro-batch."""
    for case in CASES.values():
        yield _row(case)


def _row(case: Case) -> tuple[str, ...]:
    counted = [(item, count) for stage in read_golden(case).communication.values() for item, count in stage.items()]

    def number(chosen: Callable[[Communication], bool], per: float = case.copies) -> str:
        found = sum(count for item, count in counted if chosen(item)) / per
        return f"{found:g}"

    def activation(item: Communication) -> bool:
        return not item.weights and item.scope[:1] == ("decoder",)

    def in_layers(item: Communication) -> bool:
        return activation(item) and "layers" in item.scope

    def over_tensor_ranks(item: Communication) -> bool:
        return activation(item) and len(item.ranks) == case.tp and item.ranks[-1] - item.ranks[0] == case.tp - 1

    layers = case.copies * case.config.layers
    backward = sum(count for item, count in counted if over_tensor_ranks(item) and item.backward)
    ends = 3 * case.copies  # the gradients of the embedding's sum and of the loss's two, which the dumps do not name apart
    return (
        case.name,
        number(lambda item: in_layers(item) and not item.backward, layers),
        f"{(backward - ends) / layers:g}",
        number(lambda item: activation(item) and "embedding" in item.scope and not item.backward),
        number(lambda item: activation(item) and "cross_entropy" in item.scope and not item.backward),
        number(lambda item: item.kind == "Send" and not item.backward, case.micro_batches),
        _weights(case),
    )


def _weights(case: Case) -> str:
    kinds: dict[str, int] = {}
    for stage in read_golden(case).communication.values():
        for item, count in stage.items():
            if item.weights:
                kinds[item.kind.split()[0]] = kinds.get(item.kind.split()[0], 0) + count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


if __name__ == "__main__":
    for line in (HEADINGS, ("---",) * len(HEADINGS), *rows()):
        print(f"| {' | '.join(line)} |")
