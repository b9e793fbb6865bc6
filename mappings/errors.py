"""Errors as data: what is wrong, where, what to do; all problems of a kind in one refusal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` names a file, rule or tensor; `mend` says what the user can do."""

    what: str
    where: str = ""
    mend: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        mend = f"\n    -> {self.mend}" if self.mend else ""
        return f"{place}{self.what}{mend}"


class Refused(Exception):
    """The request was understood and is refused, with every problem found. Nothing was written. The CLI prints it and exits with 1."""

    def __init__(self, title: str, problems: Iterable[Problem] = ()) -> None:
        self.title = title
        self.problems = tuple(problems)
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[Refused], tuple[str, tuple[Problem, ...]]]:
        return Refused, (self.title, self.problems)  # it crosses from a worker process whole


def refuse(what: str, where: str = "", mend: str = "") -> Refused:
    """A refusal with one problem: `raise refuse("truncated file", path, "download it again")`."""
    return Refused(what, [Problem(what, where, mend)])
