"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from converter.display import console, duration, printable
from train.planning.choices import Choice
from train.planning.estimate import Estimate

GIB = 1 << 30
MAX_REASONS = 12


def show_plan(facts: dict[str, Any], found: Sequence[Choice], tokens_per_second: float | None) -> None:
    """The model, the layouts in their order, where the memory of the first goes, and what cannot be and why."""
    out = console()
    model, work, device = facts["model"], facts["workload"], facts["device"]
    out.print(f"[bold]{printable(model['path'])}[/]  {printable(model['family'])}, {model['parameters']:,} parameters")
    out.print(
        f"  {facts['devices']} x {printable(device['name'])}, {_gib(device['usable_memory'])} of {_gib(device['memory'])} GiB usable; "
        f"{work['global_batch']} sequences of {work['seq_length']:,} tokens a step, {work['weights']} weights"
    )
    priced = [choice for choice in found if choice.best is not None]
    if priced:
        out.print(_layouts(priced, tokens_per_second))
    best = next((choice.best for choice in found if choice.feasible and choice.best is not None), None)
    if best is not None:
        out.print(_memory(best))
        _show_costs(out, best)
    _show_reasons(out, found)


def _layouts(found: Sequence[Choice], tokens_per_second: float | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    headings = ["dp x tp x pp", "micro-batches", "recompute", "sharded", "GiB", "bubble", "sent", "step", "tokens/s", "MFU"]
    for heading in (*headings, *(["MFU needed"] if tokens_per_second else []), ""):
        table.add_column(heading, justify="right")
    for choice in found:
        best = choice.best
        assert best is not None, "the caller chose those with an estimate"
        run = best.run
        cells = [
            f"{choice.dp} x {choice.tp} x {choice.pp}", f"{run.micro_batches} x {run.micro_batch}", _recompute(best),
            "yes" if run.optimizer_sharding else "no", _gib(best.memory.total), f"{best.bubble:.1%}",
            f"{max(stage.traffic.total for stage in best.stages) / GIB:.1f}", duration(best.seconds), f"{best.tokens_per_second:,.0f}",
            f"{best.utilisation(best.tokens_per_second):.0%}",
            *([f"{best.utilisation(tokens_per_second):.0%}"] if tokens_per_second else []),
        ]  # fmt: skip
        table.add_row(*cells, "[green]fits[/]" if choice.feasible else "[red]too large[/]", style="" if choice.feasible else "dim")
    return table


def _recompute(found: Estimate) -> str:
    run = found.run
    if not run.recompute_every:
        return "none"
    stage = found.memory.stage
    layers = run.layout.layers_per_stage[stage]
    return f"{layers - run.kept_layers(stage)} of {layers}"


def _memory(best: Estimate) -> Table:
    """Where the memory goes, in GiB, for each kind of stage."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), title="GiB of a rank", title_justify="left", title_style="bold")
    names = ("weights", "gradients", "optimizer", "activations", "inputs", "logits", "working", "casts", "communication", "tables")
    for heading in ("stage", *names, "fullest while", "in all"):
        table.add_column(heading, justify="right")
    for stage in best.stages:
        memory = stage.memory
        fullest = max(memory.phases, key=lambda phase: memory.phases[phase])
        table.add_row(str(memory.stage), *(_gib(getattr(memory, name)) for name in names), fullest, _gib(memory.total))
    return table


def _show_costs(out: Console, best: Estimate) -> None:
    sent = max((stage.traffic for stage in best.stages), key=lambda traffic: traffic.total)
    kinds = ("tensor", "pipeline", "data", "optimizer", "shared")
    parts = ", ".join(f"{kind} {getattr(sent, kind) / GIB:.2f}" for kind in kinds if getattr(sent, kind))
    out.print(f"  sent by a rank in a step, GiB: {parts or 'nothing'}")
    out.print(f"  a step is {best.flops:.3g} operations; time and MFU assume {best.device.efficiency:.0%} of the peak in matrix products")


def _show_reasons(out: Console, found: Sequence[Choice]) -> None:
    impossible = [choice for choice in found if not choice.feasible]
    for choice in impossible[:MAX_REASONS]:
        reasons = "; ".join(problem.what for problem in choice.problems)
        out.print(f"  [red]not[/] dp {choice.dp} x tp {choice.tp} x pp {choice.pp}: {printable(reasons)}")
        if len(impossible) == 1:
            for mend in dict.fromkeys(problem.mend for problem in choice.problems if problem.mend):
                out.print(f"    [green]->[/] {printable(mend)}")
    if len(impossible) > MAX_REASONS:
        out.print(f"  and {len(impossible) - MAX_REASONS} more that cannot be (--json lists them)")


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"
