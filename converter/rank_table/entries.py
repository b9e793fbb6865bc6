"""Reading a rank table's values: each with its line, as a text or a number where it is one, and a finding where it is none."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from converter.digits import whole_number
from converter.findings import Finding, Severity
from converter.rank_table.located_json import Node
from converter.untrusted import quoted

MAX_NUMBER = 1 << 32


@dataclass(frozen=True)
class DeviceEntry:
    """A device as the file has it. A value that is missing or of the wrong kind is None, and a finding has said so."""

    line: int
    device_id: int | None
    rank_id: int | None
    device_ip: str | None
    super_device_id: int | None
    lines: Mapping[str, int]

    def line_of(self, key: str) -> int:
        """The line of the value at `key`, or of the device where it has none."""
        return self.lines.get(key, self.line)


@dataclass(frozen=True)
class ServerEntry:
    """A server as the file has it."""

    line: int
    server_id: str | None
    host_ip: str | None
    devices: tuple[DeviceEntry, ...]


class Findings:
    """The findings of one file. Every one of them names its line."""

    def __init__(self, file: str) -> None:
        self.found: list[Finding] = []
        self._file = file

    def add(
        self, rule: str, line: int, seen: str, *, wanted: str, why: str = "", mend: str = "", severity: Severity = "error"
    ) -> None:  # fmt: skip
        self.found.append(Finding(f"rank-table-{rule}", severity, seen, wanted, why, mend, f"{self._file}:{line}"))


class Entry:
    """An object of the file. `place` says which, as in `server_list[0].device[3]`."""

    def __init__(self, node: Node, place: str, findings: Findings) -> None:
        self.line = node.line
        self.place = place
        self._members: Mapping[str, Node] = node.value if isinstance(node.value, dict) else {}
        self._findings = findings
        if not isinstance(node.value, dict):
            findings.add("type", node.line, f"{place} is {_kind(node)}", wanted="an object in braces", why=NOT_READ)

    def has(self, key: str) -> bool:
        return key in self._members

    @property
    def lines(self) -> Mapping[str, int]:
        """The line of each value."""
        return {key: node.line for key, node in self._members.items()}

    def line_of(self, key: str) -> int:
        return self._members[key].line if key in self._members else self.line

    def text(self, key: str, *, needed: bool = True) -> str | None:
        """The text at `key`. HCCL takes nothing else for a value, numbers included."""
        node = self._members.get(key)
        if node is None:
            if needed:
                self._findings.add("missing", self.line, f"{self.place} has no {key}", wanted=f'"{key}": "..."', why=MISSING)
            return None
        if isinstance(node.value, str):
            return node.value
        shown = _kind(node)
        self._findings.add("type", node.line, f"{self.place}.{key} is {shown}", wanted=f"a text: {_as_text(node)}", why=NOT_TEXT)
        return str(node.value) if type(node.value) is int else None

    def number(self, key: str, *, needed: bool = True, low: int = 0, high: int = MAX_NUMBER) -> int | None:
        """The whole number whose digits stand at `key`."""
        text = self.text(key, needed=needed)
        if text is None:
            return None
        value = whole_number(text)
        if value is not None and low <= value <= high:
            return value
        wanted = "a whole number in digits" + (f", from {low} to {high}" if high < MAX_NUMBER else "")
        self._findings.add("number", self.line_of(key), f"{self.place}.{key} is {quoted(text)}", wanted=wanted, why=INVALID)
        return None

    def address(self, key: str, *, needed: bool = True) -> str | None:
        """The IP address at `key`."""
        text = self.text(key, needed=needed)
        if text is not None and not is_address(text):
            why = f"{INVALID} Reason:[The ip in ranktable is not a valid ip address]"
            self._findings.add("address", self.line_of(key), f"{self.place}.{key} is {quoted(text)}", wanted="an IP address", why=why)
            return None
        return text

    def entries(self, key: str) -> Iterator[Entry]:
        """The objects in the list at `key`."""
        node = self._members.get(key)
        if node is None:
            self._findings.add("missing", self.line, f"{self.place} has no {key}", wanted=f'"{key}": [...]', why=MISSING)
            return
        if not isinstance(node.value, list) or not node.value:
            seen = "an empty list" if isinstance(node.value, list) else _kind(node)
            self._findings.add("type", node.line, f"{self.place}.{key} is {seen}", wanted="a list with at least one entry", why=NOT_READ)
            return
        for index, item in enumerate(node.value):
            yield Entry(item, f"{key}[{index}]" if self.place == ROOT else f"{self.place}.{key}[{index}]", self._findings)


ROOT = "the table"
INVALID = "EI0004: The ranktable or rank is invalid."
MISSING = f"{INVALID} HCCL logs: json object has no property called ..."
NOT_READ = f"{INVALID} Reason:[Invalid ranktable format.]"
NOT_TEXT = f"{INVALID} HCCL logs: json object property value of Name[...] is not string!"


def is_address(text: str) -> bool:
    """Whether it is an IPv4 or IPv6 address. One with a zone, as in fe80::1%eth0, is none: it says nothing to another host."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _kind(node: Node) -> str:
    value = node.value
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else "a text" if isinstance(value, str) else f"the number {value}"


def _as_text(node: Node) -> str:
    return f'"{node.value}"' if type(node.value) in (int, float) else '"..."'
