"""What a person sees: sizes, plans, errors and progress, on a terminal and in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mappings.errors import Refused

PROBLEMS_SHOWN = 24  # a screen of them
LOG_WIDTH = 160
LOG_INTERVAL = 5.0  # seconds between the lines of a log


def size(count: float) -> str:
    """Bytes for a person: 1.5 GB (decimal, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds for a person: 0.4 s, 75 s as 1:15, 2:05:00."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def ranges(numbers: list[int]) -> str:
    """Sorted numbers for a person: 0-7, 12."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def printable(text: str) -> str:
    """Text from a file made safe for a terminal: no control characters, no markup."""
    return escape("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text))


def console(stderr: bool = False) -> Console:
    """A console; in a log, where nobody can widen the window, lines are not folded and tables have room for whole names."""
    stream = sys.stderr if stderr else sys.stdout
    return (
        Console(stderr=stderr, highlight=False)
        if stream is not None and stream.isatty()
        else Console(stderr=stderr, highlight=False, soft_wrap=True, width=LOG_WIDTH)
    )


def layout_text(layout: dict[str, Any]) -> str:
    """tp 2 x pp 2 x dp 1, layers per stage 16,16"""
    stages = ",".join(map(str, layout["layers_per_stage"]))
    return f"tp {layout['tp']} x pp {layout['pp']} x dp {layout['dp']}, layers per stage {stages}"


def show_refusal(error: Refused) -> None:
    """One screen: what is wrong, where, what to do."""
    out = console(stderr=True)
    out.print(f"[bold red]refused:[/] {printable(error.title)}")
    mend = ""
    shown = error.problems[:PROBLEMS_SHOWN]
    for index, problem in enumerate(shown):
        place = f"[cyan]{printable(problem.where)}[/]: " if problem.where else ""
        what = "" if problem.what == error.title else printable(problem.what)
        if place or what:
            out.print(f"  {place}{what}".rstrip(": ") if not what else f"  {place}{what}")
        following = shown[index + 1].mend if index + 1 < len(shown) else ""
        mend = problem.mend
        if mend and mend != following:
            out.print(f"    [green]->[/] {printable(mend)}")
    if len(error.problems) > len(shown):
        out.print(f"  and {len(error.problems) - len(shown)} more")


def show_plan(facts: dict[str, Any]) -> None:
    """The plan of hf2ms as a person reads it."""
    out, layout = console(), facts["layout"]
    out.print(f"[bold]{printable(facts['model'])}[/]  {printable(facts['family'])}, {facts['parameters']:,} parameters")
    source = facts["source"]
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in source["dtypes"].items())
    read_as = "as Hugging Face: " if facts["command"] == "translate" else ""
    out.print(f"  source   {read_as}{source['files']} file(s), {source['tensors']} tensors ({dtypes}), {size(source['bytes'])}")
    disk = "" if facts["disk"] == "rank" else f"{facts['disk']}, for "
    out.print(f"  layout   {disk}{layout_text(layout)}, {facts['format']}, dtype {facts['dtype']}")
    _show_target(out, facts["target"])
    out.print(_rank_table(facts["ranks"]))
    for entry in facts["dropped"]:
        out.print(f"  dropped     {printable(entry['name'])}: {printable(entry['why'])}")
    for entry in facts["duplicates"]:
        out.print(
            f"  duplicate   {printable(entry['name'])} repeats {printable(entry['of'])} (bytes are compared before anything is written)"
        )
    for entry in facts["padded"]:
        out.print(f"  padded      {printable(entry['name'])}: {entry['axis']} {entry['from']} -> {entry['to']}")
    for entry in facts["replicated"]:
        out.print(f"  replicated  {printable(entry['name'])}: {entry['why']}")
    for entry in facts["left"]:
        out.print(f"  left behind {printable(entry['name'])}: {entry['why']}")
    for note in facts["notes"]:
        out.print(f"  [yellow]note[/]        {printable(note)}")
    _show_needs(out, facts)


def _show_target(out: Console, target: dict[str, Any]) -> None:
    if target["version"] is not None:
        out.print(f"  names    {printable(target['dialect'])}, layout version {printable(target['version'])}")


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    """Ranks with equal numbers share a line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for heading in ("rank", "stage", "tensor", "layers", "files", "tensors", "bytes each"):
        table.add_column(heading, justify="right")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for fact in ranks:
        groups.setdefault((fact["stage"], tuple(fact["layers"]), fact["tensors"], fact["bytes"]), []).append(fact)
    for (stage, layers, tensors, nbytes), members in groups.items():
        links = sum(fact["link_to"] is not None for fact in members)
        files = f"{len(members) - links}" + (f" + {links} links" if links else "")
        tensor_ranks = ranges(sorted({fact["tensor"] for fact in members}))
        table.add_row(
            ranges([fact["rank"] for fact in members]),
            str(stage),
            tensor_ranks,
            f"{layers[0]}-{layers[1]}",
            files,
            str(tensors),
            size(nbytes),
        )
    return table


def show_foreign(facts: dict[str, Any]) -> None:
    """The plan of ms2hf from a checkpoint without a manifest as a person reads it."""
    out = console()
    out.print(
        f"[bold]{printable(facts['checkpoint'])}[/]  {facts['kind']}, {printable(facts['family'])}, {facts['checkpoint_files']} file(s)"
    )
    _show_target(out, facts["target"])
    for file in facts["files"]:
        out.print(f"  {printable(file['path'])}: {file['tensors']} tensors, {size(file['bytes'])}")
    for entry in facts["ignored"]:
        names = ", ".join(entry["names"][:8]) + (", ..." if len(entry["names"]) > 8 else "")
        out.print(f"  left out      {entry['count']} of {printable(entry['why'])}: {printable(names)}")
    for note in facts["notes"]:
        out.print(f"  [yellow]note[/]          {printable(note)}")
    out.print(f"  side files    {', '.join(map(printable, facts['side_files'])) or 'none'}")
    _show_needs(out, facts)


def show_restoration(facts: dict[str, Any]) -> None:
    """The plan of ms2hf as a person reads it."""
    out = console()
    out.print(f"[bold]{printable(facts['rank_tree'])}[/]  {printable(facts['family'])}, {layout_text(facts['layout'])}")
    _show_target(out, facts["target"])
    for file in facts["files"]:
        out.print(f"  {printable(file['path'])}: {file['tensors']} tensors, {size(file['bytes'])}")
    for entry in facts["not_restored"]:
        out.print(f"  not restored  {printable(entry['name'])}: {printable(entry['why'])}")
    for old, new in facts["renamed"].items():
        out.print(f"  renamed       {printable(old)} comes back as {printable(new)}")
    out.print(f"  side files    {', '.join(map(printable, facts['side_files'])) or 'none'}")
    _show_needs(out, facts)


def _show_needs(out: Console, facts: dict[str, Any]) -> None:
    needs = facts["needs"]
    written = ", ".join(f"{size(count)} {dtype}" for dtype, count in facts["bytes_by_dtype"].items())
    out.print(f"  needs    disk {size(needs['disk'])} ({written}), memory up to {size(needs['memory'])} with {needs['workers']} worker(s)")


@contextmanager
def progress(label: str, total: int, quiet: bool = False) -> Iterator[Progress]:
    """Progress over `total` bytes on stderr: a bar on a terminal, plain lines in a log, nothing when quiet."""
    kind = Progress if quiet else _Bar if sys.stderr is not None and sys.stderr.isatty() else _Lines
    shown = kind(label, total)
    try:
        yield shown
        shown.close()
    except BaseException:
        shown.stop()
        raise


class Progress:
    """Counts bytes; the base class shows nothing. `reach` may be called from any thread."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.started = time.monotonic()
        self.lock = threading.Lock()

    def reach(self, done: int) -> None:
        """`done` bytes are done in all."""
        with self.lock:
            self.done = done
            self.show()

    def show(self) -> None:
        """Bring what is seen up to date."""

    def stop(self) -> None:
        """Leave the terminal clean after an error."""

    def close(self) -> None:
        """Everything is done."""

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)


class _Lines(Progress):
    """A line every few seconds."""

    def __init__(self, label: str, total: int) -> None:
        super().__init__(label, total)
        self.last = self.started

    def show(self) -> None:
        now = time.monotonic()
        if now - self.last >= LOG_INTERVAL and self.done < self.total:
            self.last = now
            rate = self.done / self.seconds
            left = (self.total - self.done) / rate if rate else 0.0
            share = 100 * self.done // max(self.total, 1)
            print(
                f"{self.label}: {size(self.done)} of {size(self.total)} ({share} %), {size(rate)}/s, {duration(left)} left",
                file=sys.stderr,
                flush=True,
            )


class _Bar(Progress):
    """A bar with bytes, rate and time left."""

    def __init__(self, label: str, total: int) -> None:
        super().__init__(label, total)
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bar = RichProgress(*columns, console=console(stderr=True), transient=True)
        self.task = self.bar.add_task(label, total=total)
        self.bar.start()

    def show(self) -> None:
        self.bar.update(self.task, completed=self.done)

    def stop(self) -> None:
        self.bar.stop()

    def close(self) -> None:
        self.bar.stop()
