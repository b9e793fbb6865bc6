"""A rank table as facts, and its JSON.

Format: HCCL user guide, "Configuring resources with a rank table file" (hcclug_000014): version 1.0, and 1.2 for super-pods (Atlas A3).
HCCL reads every value as a text: a number without quotes is refused ("json object property value of Name[...] is not string!").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Version = Literal["1.0", "1.2"]


@dataclass(frozen=True)
class Device:
    """`device_id` is the physical number, that of /dev/davinciN; `super_device_id` is known in a super-pod only."""

    device_id: int
    device_ip: str
    super_device_id: int | None = None


@dataclass(frozen=True)
class Server:
    """One host, known by its IP address, and those of its devices that take part, by number."""

    server_id: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class SuperPod:
    """Servers whose devices are wired to one another."""

    super_pod_id: str
    servers: tuple[str, ...]


def as_json(servers: Sequence[Server], version: Version, super_pods: Sequence[SuperPod] = ()) -> str:
    """The file. Ranks are numbered in the order of the servers, and of the devices in each."""
    rank, entries = 0, []
    for server in servers:
        devices = [_device(device, rank + index) for index, device in enumerate(server.devices)]
        rank += len(devices)
        entries.append({"server_id": server.server_id, "device": devices})
    document: dict[str, Any] = {"version": version, "server_count": str(len(servers)), "server_list": entries}
    if version == "1.2":
        document["super_pod_list"] = [_super_pod(pod) for pod in super_pods]
    return json.dumps(document | {"status": "completed"}, indent=2) + "\n"


def _device(device: Device, rank: int) -> Mapping[str, str]:
    ids = {} if device.super_device_id is None else {"super_device_id": str(device.super_device_id)}
    return {"device_id": str(device.device_id), **ids, "device_ip": device.device_ip, "rank_id": str(rank)}


def _super_pod(pod: SuperPod) -> Mapping[str, Any]:
    return {"super_pod_id": pod.super_pod_id, "server_list": [{"server_id": server} for server in pod.servers]}
