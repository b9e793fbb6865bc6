"""What a check found: a fact as data, for a person and for a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]
ORDER: tuple[Severity, ...] = ("error", "warning")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    `seen` is what was found, `where` the file and line or the variable; `wanted` what would be right; `why` the error that it causes, as a
    person would meet it; `mend` a command or a deed. An error ends a run or makes it wrong; a warning may.
    """

    rule: str
    severity: Severity
    seen: str
    wanted: str = ""
    why: str = ""
    mend: str = ""
    where: str = ""

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def count(findings: Iterable[Finding], severity: Severity) -> int:
    """How many of them are of this severity."""
    return sum(finding.severity == severity for finding in findings)


def sorted_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, else in the order given."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if there is an error; warnings do not fail."""
    return int(count(findings, "error") > 0)
