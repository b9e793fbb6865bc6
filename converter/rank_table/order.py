"""The order of ranks: from 0 without gaps, server by server, and device by device within each.

MindSpore's guide (tutorials/parallel/rank_table.md) wants the ranks in the dictionary order of server_id. Slices belong to ranks by
number, so a table in another order gives each device another one's slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from converter.display import ranges
from converter.rank_table.entries import INVALID, Findings, ServerEntry

FIRST_SHOWN = 20
MAX_SHOWN = 80  # characters


def check_ranks(servers: Sequence[ServerEntry], findings: Findings) -> None:
    """Adds what is wrong with the rank_ids of a table."""
    devices = [device for server in servers for device in server.devices]
    known = [device.rank_id for device in devices if device.rank_id is not None]
    repeated = Counter(known)
    seen: set[int] = set()
    for device in devices:
        if device.rank_id is not None and repeated[device.rank_id] > 1 and device.rank_id in seen:
            why = f"{INVALID} Reason:[The 'rank_id' in the ranktable must start from 0 or it is used repeatedly]"
            findings.add("rank-id", device.line_of("rank_id"), f"rank_id {device.rank_id} again", wanted="each rank once", why=why)
        seen.update(() if device.rank_id is None else (device.rank_id,))
    if len(known) == len(devices):
        _check_gaps(known, len(devices), servers, findings)
    if sorted(known) == list(range(len(devices))):
        _check_order(servers, findings)


def _check_gaps(known: Sequence[int], count: int, servers: Sequence[ServerEntry], findings: Findings) -> None:
    missing = sorted(set(range(count)) - set(known))
    if not missing or len(set(known)) < len(known):  # a rank that is there twice is missing elsewhere: one finding is enough
        return
    why = f"{INVALID} Reason:[The 'rank_id' in the ranktable must start from 0 or it is used repeatedly]"
    shown = ranges(missing[:FIRST_SHOWN]) + (", ..." if len(missing) > FIRST_SHOWN else "")
    line = next(device.line_of("rank_id") for server in servers for device in server.devices if device.rank_id not in range(count))
    findings.add("rank-id", line, f"{count} devices, but no rank_id {shown}", wanted=f"rank_id 0 to {count - 1}", why=why)


def _check_order(servers: Sequence[ServerEntry], findings: Findings) -> None:
    spans = [(server, sorted(device.rank_id or 0 for device in server.devices)) for server in servers if server.devices]
    for server, ranks in spans:
        if ranks[-1] - ranks[0] >= len(ranks):
            why = "slices are cut for ranks that lie together; tensor parallelism would go over the slow network"
            findings.add(
                "server-order", server.line, f"server {_name(server)} has the ranks {_shown(ranges(ranks))}",
                wanted="the ranks of a server in one run", why=why,
            )  # fmt: skip
        _check_slots(server, findings)
    by_rank = [server.server_id or "" for server, _ in sorted(spans, key=lambda span: span[1][0])]
    if by_rank != sorted(by_rank):
        findings.add(
            "server-order", spans[0][0].line, f"servers by rank: {_names(by_rank)}",
            wanted=f"the dictionary order of server_id: {_names(sorted(by_rank))}",
            why="MindSpore's guide wants it so; where code relies on it, a rank gets another rank's slice", severity="warning",
        )  # fmt: skip


def _check_slots(server: ServerEntry, findings: Findings) -> None:
    slots = [device.device_id for device in sorted(server.devices, key=lambda device: device.rank_id or 0) if device.device_id is not None]
    if slots != sorted(slots):
        findings.add(
            "device-order", server.line, f"server {_name(server)}: devices by rank {_shown(', '.join(map(str, slots)))}",
            wanted="device_id rising with rank_id", severity="warning",
            why="msrun gives local rank N the device N: with the table a rank is on another device than without",
        )  # fmt: skip


def _name(server: ServerEntry) -> str:
    return _shown(server.server_id or "")


def _names(servers: Sequence[str]) -> str:
    return ", ".join(map(_shown, servers[:8]))


def _shown(text: str) -> str:
    """A file may hold a name, or ranks, of any length."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
