"""All rules on one machine, and what can be done here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from converter.doctor import ascend_rules, hccl_rules, rank_rules, run_rules, version_rules
from converter.doctor.rule import Case, Rule
from converter.doctor.version_rules import OWN_NEEDS, fits
from converter.findings import Finding, count, sorted_by_severity
from converter.machine.facts import Machine

RULES: tuple[Rule, ...] = (
    *version_rules.RULES, *ascend_rules.RULES, *rank_rules.RULES, *hccl_rules.RULES, *run_rules.RULES,
)  # fmt: skip
CONVERSION = ("numpy", "ml_dtypes", "safetensors", "xxhash")


@dataclass(frozen=True)
class Activity:
    """Something that one does with ms-convert, and what is missing for it; nothing missing: it will work."""

    name: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Examination:
    """What was found."""

    case: Case
    findings: tuple[Finding, ...]
    activities: tuple[Activity, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "errors": count(self.findings, "error"),
            "warnings": count(self.findings, "warning"),
            "findings": [finding.facts() for finding in self.findings],
            "activities": [{"name": entry.name, "works": not entry.missing, "missing": list(entry.missing)} for entry in self.activities],
            "machine": machine_facts(self.case.machine),
        }


def examine(case: Case) -> Examination:
    """Every finding, errors first; those of the rank table's own lines stand among them."""
    found = [finding for rule in RULES for finding in rule.findings(case)]
    found += case.table.findings if case.table else ()
    findings = tuple(sorted_by_severity(found))
    return Examination(case, findings, _activities(case.machine, findings))


def _activities(machine: Machine, findings: tuple[Finding, ...]) -> tuple[Activity, ...]:
    mindspore, torch, transformers = ([*_lacking(machine, name)] for name in OWN_NEEDS)
    broken = [f"mended: {finding.seen}" for finding in findings if finding.rule in BREAK_MINDSPORE and finding.severity == "error"]
    ascend = [*mindspore, *_missing_of_ascend(machine)]
    errors = count(findings, "error")
    if not ascend and errors:
        ascend.append(f"{errors} {'error' if errors == 1 else 'errors'} mended (above)")
    return (
        Activity("convert between Hugging Face and MindSpore", tuple(name for name in CONVERSION if name not in machine.packages)),
        Activity("read .bin weights", tuple(torch)),
        Activity("verify: compare every bit", tuple(name for name in CONVERSION if name not in machine.packages)),
        Activity("verify --forward: run both models", (*mindspore, *broken, *torch, *transformers)),
        Activity("train on this machine's CPU", (*mindspore, *broken)),
        Activity("train on Ascend", tuple(ascend)),
    )


BREAK_MINDSPORE = frozenset({"mindspore-requirements", "mindspore-shadow", "numpy-2", "python-mindspore"})
"""Rules whose errors keep MindSpore from running at all, NPU or not."""


def _lacking(machine: Machine, name: str) -> list[str]:
    version = machine.packages.get(name)
    return [] if version is not None and fits(version, OWN_NEEDS[name]) else [f"{name}{OWN_NEEDS[name]}"]


def _missing_of_ascend(machine: Machine) -> list[str]:
    accepted = machine.mindspore.accepted_cann if machine.mindspore else None
    cann = f"CANN {', '.join(accepted)}" if accepted else "CANN"
    parts = {
        "an NPU (/dev/davinciN)": bool(machine.devices),
        "the driver (/usr/local/Ascend/driver)": machine.driver is not None,
        cann: machine.cann is not None or bool(machine.cann_on_disk),
    }
    return [name for name, there in parts.items() if not there]


def machine_facts(machine: Machine) -> dict[str, Any]:
    """The versions and devices, for a report."""
    return {
        "python": machine.python,
        "architecture": machine.architecture,
        "hostname": machine.hostname,
        "packages": dict(machine.packages),
        "accepted_cann": list(machine.mindspore.accepted_cann or ()) if machine.mindspore else [],
        "cann": machine.cann and machine.cann.version,
        "driver": machine.driver,
        "devices": list(machine.devices),
        "npus": [{"device": npu.device, "name": npu.name, "health": npu.health} for npu in machine.npus],
    }
