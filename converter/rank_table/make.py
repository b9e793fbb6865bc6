"""Making a rank table from what a person knows: the servers, how many devices each has, and the devices' addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from converter.digits import whole_number
from converter.rank_table.check import ASK_ADDRESS, MAX_DEVICE_ID
from converter.rank_table.entries import is_address
from converter.rank_table.sources import device_addresses, super_device_ids
from converter.rank_table.table import Device, Server, SuperPod, Version
from converter.untrusted import quoted
from mappings.errors import Problem, Refused

OwnAddresses = Callable[[str], Mapping[int, str]]
"""The addresses of the devices of a server, if it is this host; else none."""


@dataclass(frozen=True)
class WantedServer:
    """A server as named on the command line."""

    address: str
    devices: tuple[int, ...]


def parse_servers(text: str) -> list[WantedServer]:
    """`10.0.0.1:8,10.0.0.2:4-7`: devices 0 to 7 of one server, 4 to 7 of the other. In the dictionary order of the addresses.

    That order is what MindSpore's guide wants the ranks in. Raises Refused with every mistake.
    """
    servers: list[WantedServer] = []
    problems = []
    for piece in text.split(","):
        address, _, devices = piece.strip().rpartition(":")
        address = address.removeprefix("[").removesuffix("]")
        numbers = _numbers(devices)
        if not is_address(address) or not numbers:
            problems.append(Problem(f"{quoted(piece)} is not ADDRESS:DEVICES", "--servers", "write 10.0.0.1:8, or 10.0.0.1:4-7 for some"))
        elif address in {server.address for server in servers}:
            problems.append(Problem(f"{address} is there twice", "--servers"))
        else:
            servers.append(WantedServer(address, numbers))
    if problems:
        raise Refused("the servers cannot be used", problems)
    return sorted(servers, key=lambda server: server.address)


def _numbers(text: str) -> tuple[int, ...]:
    """Of `8` the numbers 0 to 7, of `4-7` 4 to 7; none if it is neither or beyond what a server has."""
    first, dash, last = text.partition("-")
    low, high = whole_number(first) if dash else 0, whole_number(last if dash else first)
    if low is None or high is None:
        return ()
    end = high + 1 if dash else high
    return tuple(range(low, end)) if end <= MAX_DEVICE_ID + 1 else ()


def fill_in(
    wanted: Sequence[WantedServer], addresses: Mapping[str, str], super_ids: Mapping[str, str], version: Version, own: OwnAddresses
) -> list[Server]:
    """The servers with all that a table says of their devices. `addresses` and `super_ids` are sources by server.

    Raises Refused with everything that is not known, and how to ask for it.
    """
    problems = [*_unknown(wanted, addresses, "--device-ips"), *_unknown(wanted, super_ids, "--super-device-ids")]
    servers = []
    for server in wanted:
        source = addresses.get(server.address)
        known = dict(own(server.address)) if source is None else device_addresses(source, server.devices)
        missing = [device for device in server.devices if device not in known]
        if missing:
            what = f"no address for device {', '.join(map(str, missing))}"
            problems.append(Problem(what, f"--device-ips {server.address}=...", ASK_ADDRESS))
        ids = super_device_ids(super_ids[server.address], server.devices) if server.address in super_ids else {}
        if version == "1.2" and not ids:
            ask = "on the server: npu-smi info -t spod-info -i NPU -c CHIP   (SDID)"
            problems.append(
                Problem("version 1.2 needs each device's number in the super-pod", f"--super-device-ids {server.address}=...", ask)
            )
        devices = (Device(device, known.get(device, ""), ids.get(device)) for device in server.devices)
        servers.append(Server(server.address, tuple(devices)))
    problems += _repeated(servers)
    if problems:
        raise Refused("the table cannot be made yet", problems)
    return servers


def _unknown(wanted: Sequence[WantedServer], given: Mapping[str, str], option: str) -> list[Problem]:
    servers = {server.address for server in wanted}
    return [Problem(f"{quoted(server)} is none of --servers", option) for server in given if server not in servers]


def _repeated(servers: Sequence[Server]) -> list[Problem]:
    seen: dict[str, str] = {}
    problems = []
    for server in servers:
        for device in server.devices:
            place = f"{server.server_id} device {device.device_id}"
            if device.device_ip and seen.setdefault(device.device_ip, place) != place:
                problems.append(Problem(f"{device.device_ip} is also the address of {seen[device.device_ip]}", place, ASK_ADDRESS))
    return problems


def parse_super_pods(text: str | None, servers: Sequence[WantedServer]) -> list[SuperPod]:
    """`10.0.0.1,10.0.0.2;10.0.0.3,10.0.0.4`: two super-pods, called 0 and 1. None: one with every server. Raises Refused."""
    known = [server.address for server in servers]
    if text is None:
        return [SuperPod("0", tuple(known))]
    pods = [tuple(piece.strip() for piece in pod.split(",")) for pod in text.split(";")]
    if sorted(server for pod in pods for server in pod) != sorted(known):
        raise Refused("each of --servers must be in one of --super-pods, and once", [Problem(f"{quoted(text)}", "--super-pods")])
    return [SuperPod(str(index), pod) for index, pod in enumerate(pods)]
