"""A rule of the doctor: what it is called, how bad it is, the error that it prevents, and how to look for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from converter.doctor.run_facts import RunFacts
from converter.findings import Finding, Severity
from converter.machine.facts import Machine
from converter.rank_table.check import CheckedTable


@dataclass(frozen=True)
class Case:
    """What the rules look at: the machine, and if given the rank table and what a run will ask."""

    machine: Machine
    table: CheckedTable | None = None
    run: RunFacts | None = None

    @property
    def one_host(self) -> bool:
        """Whether it is known that the job stays on one host, where devices need no network."""
        hosts = [self.run.nodes if self.run else 0, len(self.table.servers) if self.table else 0]
        return max(hosts) == 1


@dataclass(frozen=True)
class Sight:
    """One thing that a rule saw. A severity here is this sight's own."""

    seen: str
    wanted: str
    mend: str = ""
    where: str = ""
    severity: Severity | None = None


Look = Callable[[Case], Iterable[Sight]]


@dataclass(frozen=True)
class Rule:
    """`why` is the error as a person would meet it, `source` where the rule is from."""

    name: str
    severity: Severity
    why: str
    source: str
    look: Look

    def findings(self, case: Case) -> Iterator[Finding]:
        """What is not as the rule wants it."""
        for sight in self.look(case):
            yield Finding(self.name, sight.severity or self.severity, sight.seen, sight.wanted, self.why, sight.mend, sight.where)


class Rules(list[Rule]):
    """The rules of one subject; `rule` adds one."""

    def rule(self, name: str, severity: Severity, *, why: str, source: str) -> Callable[[Look], Look]:
        """Makes a rule of the function that looks."""

        def add(look: Look) -> Look:
            self.append(Rule(name, severity, why, source, look))
            return look

        return add
