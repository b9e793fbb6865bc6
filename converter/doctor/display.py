"""What the doctor and the rank table's checker show a person."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from converter.display import console, printable
from converter.doctor.examine import Activity, Examination
from converter.doctor.rule import Case
from converter.findings import Finding, Severity, count
from converter.machine.facts import Machine

COLOURS: dict[Severity, str] = {"error": "bold red", "warning": "yellow"}
MAX_SHOWN = 60
SHOWN = ("mindspore", "numpy", "protobuf", "safetensors", "torch", "transformers")


def show_examination(examination: Examination) -> None:
    """The machine, what is wrong with it, and what can be done on it."""
    out = console()
    _show_machine(out, examination.case.machine)
    _show_table(out, examination.case)
    show_findings(out, examination.findings)
    out.print("\n[bold]what works here[/]")
    for activity in examination.activities:
        _show_activity(out, activity)
    out.print(verdict(examination.findings))


def verdict(findings: Iterable[Finding]) -> str:
    """One line: how many errors and warnings."""
    found = list(findings)
    errors, warnings = count(found, "error"), count(found, "warning")
    if not found:
        return "[bold green]nothing found[/]"
    words = [f"{number} {word}{'' if number == 1 else 's'}" for number, word in ((errors, "error"), (warnings, "warning")) if number]
    return f"[{COLOURS['error' if errors else 'warning']}]{', '.join(words)}[/]"


def _show_machine(out: Console, machine: Machine) -> None:
    packages = (f"{name} {machine.packages[name]}" for name in SHOWN if name in machine.packages)
    out.print(f"[bold]{printable(machine.hostname)}[/]  {printable(machine.architecture)}, Python {printable(machine.python)}")
    out.print(f"  packages  {printable(', '.join(packages))}")
    if not machine.has_ascend:
        out.print("  Ascend    none on this machine: no driver, no CANN, no NPU")
        return
    cann = f"CANN {machine.cann.version or 'of unknown version'} in {machine.cann.home}" if machine.cann else "no CANN set up"
    devices = f"{len(machine.devices)} NPUs" + "".join(f" ({name})" for name in sorted({npu.name for npu in machine.npus}))
    out.print(f"  Ascend    {printable(cann)}, driver {printable(machine.driver or 'missing')}, {printable(devices)}")


def _show_table(out: Console, case: Case) -> None:
    """Which rank table was checked, so that no finding means something."""
    if case.table is None:
        return
    servers = len(case.table.servers)
    held = "" if case.machine.devices else "; checked by itself: without NPUs there is nothing here to hold it against"
    out.print(f"  table     {printable(case.table.path)}: {servers} server{'' if servers == 1 else 's'}, {case.table.ranks} ranks{held}")


def show_findings(out: Console, findings: Iterable[Finding]) -> None:
    """Each with what was seen, what is wanted, the error that it causes, and the mend."""
    found = list(findings)
    for finding in found[:MAX_SHOWN]:
        named = finding.seen.startswith(finding.where)  # the variable or key stands in what was seen
        where = "" if named else f"[cyan]{printable(finding.where)}[/]: "
        out.print(f"\n[{COLOURS[finding.severity]}]{finding.severity}[/]  {where}{printable(finding.seen)}  [dim]{finding.rule}[/]")
        for label, text in (("wanted", finding.wanted), ("why", finding.why), ("mend", finding.mend)):
            if text:
                out.print(f"  {label:<8}{printable(text)}")
    if len(found) > MAX_SHOWN:
        out.print(f"\nand {len(found) - MAX_SHOWN} more; --json has them all")


def _show_activity(out: Console, activity: Activity) -> None:
    if not activity.missing:
        out.print(f"  [green]yes[/]  {activity.name}")
        return
    out.print(f"  [yellow]no[/]   {activity.name}; wanted: {printable('; '.join(activity.missing))}")
