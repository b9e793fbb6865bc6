"""The network of a host as Linux tells it in /proc and /sys: addresses, interfaces, ports in use, port ranges."""

from __future__ import annotations

import ipaddress
import re

from converter.digits import whole_number
from converter.machine.system import System

LINUX_EPHEMERAL = (32768, 60999)
_LISTEN = "0A"
_LOCAL = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\s+/32 host LOCAL")


def own_addresses(system: System) -> tuple[str, ...]:
    """The addresses of this host, loopback included (`/proc/net/fib_trie`, `/proc/net/if_inet6`)."""
    found = set(_LOCAL.findall(system.text("/proc/net/fib_trie") or ""))
    for line in (system.text("/proc/net/if_inet6") or "").splitlines():
        digits = line.split(" ", 1)[0]
        if re.fullmatch(r"[0-9a-f]{32}", digits):
            found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return tuple(sorted(found))


def interfaces(system: System) -> tuple[str, ...]:
    """The names of the network interfaces."""
    return tuple(system.names("/sys/class/net"))


def listening_ports(system: System) -> frozenset[int]:
    """TCP ports that something listens on (`/proc/net/tcp`, `/proc/net/tcp6`: state 0A)."""
    ports = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (system.text(file) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTEN:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return frozenset(ports)


def reserved_ports(system: System) -> tuple[tuple[int, int], ...]:
    """Ranges that the kernel hands to nobody who does not ask for them: `net.ipv4.ip_local_reserved_ports`, as in 60000-60015,8118."""
    return tuple(port_ranges(system.text("/proc/sys/net/ipv4/ip_local_reserved_ports") or "") or ())


def ephemeral_ports(system: System) -> tuple[int, int]:
    """The range that the kernel hands out: `net.ipv4.ip_local_port_range`."""
    numbers = [whole_number(text) for text in (system.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()]
    low, high = numbers if len(numbers) == 2 else (None, None)
    return LINUX_EPHEMERAL if low is None or high is None else (low, high)


def port_ranges(text: str) -> list[tuple[int, int]] | None:
    """`60000-60015,8118` as ranges, both ends included; None if it is not of that form."""
    ranges = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = piece.partition("-")
        low, high = whole_number(first), whole_number(last if dash else first)
        if low is None or high is None:
            return None
        ranges.append((low, high))
    return ranges
