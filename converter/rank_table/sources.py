"""Where the addresses of devices come from: a list, an hccn.conf, or what hccn_tool and npu-smi print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from converter.digits import whole_number
from converter.rank_table.entries import is_address
from converter.untrusted import opened, quoted
from mappings.errors import refuse

HCCN_CONF = "etc/hccn.conf"
MAX_BYTES = 1 << 20
_ADDRESS = re.compile(r"^[ \t]*(?:ipv6_)?address_(\d{1,4})[ \t]*=[ \t]*(\S{1,64})[ \t\r]*$", re.MULTILINE)
_PRINTED = re.compile(r"^[ \t]*ip(?:v6)?(?:_?addr(?:ess)?)?[ \t]*:[ \t]*([0-9A-Fa-f:.]{1,64})[ \t\r]*$", re.MULTILINE)
_SDID = re.compile(r"^[ \t]*SDID[ \t]*:[ \t]*(\d{1,12})[ \t\r]*$", re.MULTILINE)


def hccn_addresses(text: str) -> dict[int, str]:
    """Device number to address in the text of an hccn.conf, whose lines are `address_0=192.168.100.101`."""
    return {int(number): address for number, address in _ADDRESS.findall(text) if is_address(address)}


def printed_address(text: str) -> str | None:
    """The address in what `hccn_tool -i N -ip -g` prints (`ipaddr:192.168.100.101`), or None."""
    return next((address for address in _PRINTED.findall(text) if is_address(address)), None)


def device_addresses(source: str, devices: tuple[int, ...]) -> dict[int, str]:
    """Device number to address, from addresses with commas between, or from a file.

    The file is an hccn.conf, or what `hccn_tool -i N -ip -g` printed for the devices in turn. Raises Refused.
    """
    pieces = [piece.strip() for piece in source.split(",")]
    if all(map(is_address, pieces)):
        return _in_turn(pieces, devices, source)
    text = read_text(Path(source))
    found = hccn_addresses(text)
    return found or _in_turn([address for address in _PRINTED.findall(text) if is_address(address)], devices, source)


def super_device_ids(source: str, devices: tuple[int, ...]) -> dict[int, int]:
    """Device number to number in the super-pod, from numbers with commas between, or from a file.

    The file is what `npu-smi info -t spod-info -i NPU -c CHIP` printed for the devices in turn (`SDID : 37748736`). Raises Refused.
    """
    pieces = [piece.strip() for piece in source.split(",")]
    if any(whole_number(piece) is None for piece in pieces):
        pieces = _SDID.findall(read_text(Path(source)))
    return {device: int(piece) for device, piece in _in_turn(pieces, devices, source).items()}


def _in_turn(values: list[str], devices: tuple[int, ...], source: str) -> dict[int, str]:
    if len(values) != len(devices):
        raise refuse(f"{len(values)} values for {len(devices)} devices", quoted(source), "give one for each device, in their order")
    return dict(zip(devices, values, strict=True))


def read_text(path: Path) -> str:
    """A small text file. Raises Refused."""
    with opened(path) as (descriptor, size):
        if size > MAX_BYTES:
            raise refuse(f"larger than {MAX_BYTES >> 20} MiB", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read().decode("utf-8", errors="replace")


def by_server(pairs: tuple[str, ...], option: str) -> Mapping[str, str]:
    """`SERVER=VALUE` of an option that may be repeated, as a mapping. Raises Refused."""
    found: dict[str, str] = {}
    for pair in pairs:
        server, equals, value = pair.partition("=")
        if not (equals and server and value) or server in found:
            raise refuse(f"{quoted(pair)} is not SERVER=VALUE with another server each time", option)
        found[server.strip()] = value.strip()
    return found
