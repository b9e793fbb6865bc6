"""How much memory a run needs, from the sizes that the executor works with."""

from __future__ import annotations

from converter.gather import BUFFER_BYTES, WIDENING
from converter.plan import Plan

BASE_BYTES = 60_000_000  # the interpreter with numpy, measured
COPY_BYTES = 350  # a planned copy with its share of headers and names, measured


def peak_memory(plan: Plan, workers: int) -> int:
    """Estimated peak resident bytes of a run: nothing in it grows with the size of a tensor."""
    copies = sum(len(tensor.copies) for file in plan.files for tensor in file.tensors)
    return BASE_BYTES + copies * COPY_BYTES + workers * 2 * WIDENING * BUFFER_BYTES
