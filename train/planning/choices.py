"""Every layout of a number of devices: which can be run, how each is run best, and which is the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from converter.layout import ParallelLayout
from mappings.errors import Problem, Refused
from train.config import MAX_MICRO_BATCHES
from train.planning.devices import Device
from train.planning.estimate import Estimate, distinct_stages, estimate
from train.planning.parameters import RankParameters
from train.planning.run_shape import RunShape, Workload
from train.planning.source import PlannedModel

MAX_MICRO_BATCH = 64


@dataclass(frozen=True)
class Wanted:
    """What the user fixed; None: the plan chooses."""

    devices: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    recompute_every: int | None = None
    optimizer_sharding: bool | None = None


@dataclass(frozen=True)
class Choice:
    """A layout and how it is run best: the fastest way that fits, or the smallest where none does. `problems`: why it cannot be run.

    `variants` are all ways that were looked at.
    """

    dp: int
    tp: int
    pp: int
    best: Estimate | None
    problems: tuple[Problem, ...]
    variants: tuple[Estimate, ...] = ()

    @property
    def feasible(self) -> bool:
        return not self.problems


def choices(model: PlannedModel, work: Workload, device: Device, wanted: Wanted) -> list[Choice]:
    """Every layout that was asked for, the fastest first, then what does not fit into memory, then what cannot be."""
    found = [_choice(model, work, device, wanted, dp, tp, pp) for dp, tp, pp in layouts(wanted)]
    return sorted(found, key=_order)


def layouts(wanted: Wanted) -> Iterator[tuple[int, int, int]]:
    """Every (dp, tp, pp) whose product is the number of devices and that is as the user fixed it; if all three are fixed, only that."""
    if wanted.dp and wanted.tp and wanted.pp:
        yield wanted.dp, wanted.tp, wanted.pp
        return
    for tp in divisors(wanted.devices):
        for pp in divisors(wanted.devices // tp):
            dp = wanted.devices // tp // pp
            if all(given in (None, value) for given, value in ((wanted.dp, dp), (wanted.tp, tp), (wanted.pp, pp))):
                yield dp, tp, pp


def divisors(number: int) -> list[int]:
    """In rising order."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _order(choice: Choice) -> tuple[int, float]:
    if choice.best is None:
        return 2, choice.tp
    return (0, choice.best.seconds) if choice.feasible else (1, choice.best.memory.total)


def _choice(model: PlannedModel, work: Workload, device: Device, wanted: Wanted, dp: int, tp: int, pp: int) -> Choice:
    problems = [*_wrong_product(wanted.devices, dp, tp, pp), *_wrong_tree(model, tp, pp), *_wrong_batch(work, wanted, dp, pp)]
    layout: ParallelLayout | None = None
    try:
        layout = model.cut(tp, pp, dp)
    except Refused as refused:
        problems += refused.problems
    if layout is None or problems:
        return Choice(dp, tp, pp, None, tuple(problems))
    held = [(stage, RankParameters.of(model.shapes(layout, stage))) for stage in distinct_stages(pp)]
    work = replace(work, model=replace(work.model, padded_vocab=layout.padded_vocab))
    variants = tuple(_variants(work, layout, device, wanted, held))
    fitting = [variant for variant in variants if variant.fits]
    if fitting:
        return Choice(dp, tp, pp, min(fitting, key=_preference), (), variants)
    least = min(variants, key=lambda variant: variant.memory.total)
    return Choice(dp, tp, pp, least, (_too_large(least),), variants)


def _preference(variant: Estimate) -> tuple[float, int, int]:
    """The fastest; of equally fast ones the smallest."""
    return round(variant.seconds, 6), variant.memory.total, variant.run.recompute_every


def _variants(
    work: Workload, layout: ParallelLayout, device: Device, wanted: Wanted, held: list[tuple[int, RankParameters]]
) -> Iterator[Estimate]:
    per_rank = work.global_batch // layout.dp
    sizes = _micro_batch_sizes(per_rank, layout.pp)
    most = max(layout.layers_per_stage)
    recomputing = sorted({0, *(every for every in (2, 4) if every < most), *({most} - {1})})
    for size in sizes if wanted.micro_batch is None else [wanted.micro_batch]:
        for every in recomputing if wanted.recompute_every is None else [wanted.recompute_every]:
            for sharding in (
                ([False, True] if layout.dp > 1 else [False]) if wanted.optimizer_sharding is None else [wanted.optimizer_sharding]
            ):
                yield estimate(RunShape(work, layout, size, every, sharding), device, held)


def _micro_batch_sizes(per_rank: int, pp: int) -> list[int]:
    """Sizes that fill the pipeline, with a number of micro-batches that the trainer takes."""
    return [size for size in divisors(per_rank) if size <= MAX_MICRO_BATCH and pp <= per_rank // size <= MAX_MICRO_BATCHES]


def _wrong_product(devices: int, dp: int, tp: int, pp: int) -> Iterator[Problem]:
    if dp * tp * pp != devices:
        mend = f"let the product be {devices}, or say --devices {dp * tp * pp}"
        yield Problem(f"dp {dp} x tp {tp} x pp {pp} is {dp * tp * pp}, not {devices}", mend=mend)


def _wrong_tree(model: PlannedModel, tp: int, pp: int) -> Iterator[Problem]:
    cut = model.layout
    if cut is not None and (cut.tp, cut.pp) != (tp, pp):
        yield Problem(f"the rank tree was cut for tp {cut.tp} x pp {cut.pp}", mend="plan from the Hugging Face folder, and cut it anew")


def _wrong_batch(work: Workload, wanted: Wanted, dp: int, pp: int) -> Iterator[Problem]:
    if work.global_batch % dp:
        mend = f"use a multiple of {dp}"
        yield Problem(f"a global batch of {work.global_batch} cannot be divided among dp {dp}", mend=mend)
        return
    per_rank = work.global_batch // dp
    if wanted.micro_batch is not None and per_rank % wanted.micro_batch:
        yield Problem(f"{per_rank} sequences of a data-parallel rank cannot be divided into micro-batches of {wanted.micro_batch}")
    elif per_rank // (wanted.micro_batch or 1) < pp:
        what = f"{per_rank // (wanted.micro_batch or 1)} micro-batches cannot fill {pp} pipeline stages"
        yield Problem(what, mend=f"use a global batch of {dp * pp * (wanted.micro_batch or 1)} or more, or fewer stages")
    elif not ([wanted.micro_batch] if wanted.micro_batch else _micro_batch_sizes(per_rank, pp)) or (
        per_rank // (wanted.micro_batch or MAX_MICRO_BATCH) > MAX_MICRO_BATCHES
    ):
        what = f"{per_rank} sequences of a data-parallel rank are more than {MAX_MICRO_BATCHES} micro-batches"
        yield Problem(what, mend=f"use a global batch of {dp * MAX_MICRO_BATCHES} or less")


def _too_large(variant: Estimate) -> Problem:
    need, have = (count / (1 << 30) for count in (variant.memory.total, variant.device.usable_memory))
    mend = "use more devices, shorter sequences, or less of what you fixed"
    return Problem(f"needs {need:.1f} GiB of each device, {have:.1f} can be had", mend=mend)
