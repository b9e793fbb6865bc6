"""What a training run will ask of the machine. The trainer fills it in from its config; its defaults and checks stay there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunFacts:
    """`port` is None if a free one will be taken. `groups` counts the communication groups that a rank is in.

    `reads` and `writes` map settings to folders; `kept` is the number of checkpoints that stay in `checkpoint_folder` (0: all).
    `environment` holds the variables that the ranks are given besides those of the shell.
    `weight_bytes` is the size of the weights that the run starts from, 0 if it is not known.
    """

    config: str
    device: Literal["cpu", "ascend"]
    ranks: int
    nodes: int
    node_rank: int | None
    master: str
    port: int | None
    node_timeout: int | None
    groups: int
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    checkpoint_folder: str
    kept: int
    weight_bytes: int
    environment: Mapping[str, str]

    @property
    def local_ranks(self) -> int:
        """Ranks on one host, rounded up where they cannot be divided."""
        return -(-self.ranks // self.nodes)
