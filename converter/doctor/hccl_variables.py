"""HCCL's environment variables: what each may hold. Source: CANN environment variable reference, pages envref_07_0072 to _0149.

A range may depend on the generation of the device: "first" is Atlas training (910A), "A2" is 910B1 to 910B4, "A3" is Ascend910 with two
chips on a card. The wider range counts where the generation is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from converter.digits import whole_number
from converter.machine.facts import Npu
from converter.rank_table.entries import is_address


@dataclass(frozen=True)
class Variable:
    """Whole numbers from `low` to `high` in steps of `step`, or one of `choices`."""

    name: str
    low: int = 0
    high: int = 2147483647
    step: int = 1
    choices: tuple[str, ...] = ()

    def allows(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        number = whole_number(value)
        return number is not None and self.low <= number <= self.high and number % self.step == 0

    @property
    def wanted(self) -> str:
        if self.choices:
            return " or ".join(self.choices)
        step = f", a multiple of {self.step}" if self.step > 1 else ""
        bounds = f"from {self.low} to {self.high}" if self.high < 2147483647 else f"{self.low} or more"
        return f"a whole number {bounds}{step}"


@dataclass(frozen=True)
class Address(Variable):
    """An IP address."""

    def allows(self, value: str) -> bool:
        return is_address(value)

    @property
    def wanted(self) -> str:
        return "an IP address"


SWITCH = ("0", "1")
VARIABLES = (
    Variable("HCCL_CONNECT_TIMEOUT", 120, 7200),
    Variable("HCCL_EXEC_TIMEOUT", 0, 2147483647),
    Variable("HCCL_IF_BASE_PORT", 1024, 65520),
    Variable("HCCL_RDMA_TIMEOUT", 5, 24),
    Variable("HCCL_RDMA_RETRY_CNT", 1, 7),
    Variable("HCCL_RDMA_TC", 0, 255, step=4),
    Variable("HCCL_RDMA_SL", 0, 7),
    Variable("HCCL_BUFFSIZE", 1),
    Variable("HCCL_INTRA_PCIE_ENABLE", choices=SWITCH),
    Variable("HCCL_INTRA_ROCE_ENABLE", choices=SWITCH),
    Variable("HCCL_WHITELIST_DISABLE", choices=SWITCH),
    Variable("HCCL_SOCKET_FAMILY", choices=("AF_INET", "AF_INET6")),
    Variable("HCCL_DETERMINISTIC", choices=("false", "true", "strict", "FALSE", "TRUE", "STRICT")),
    Variable("HCCL_OP_EXPANSION_MODE", choices=("AI_CPU", "AIV", "HOST", "HOST_TS", "CCU_MS", "CCU_SCHED")),
    Address("HCCL_IF_IP"),
)
BY_GENERATION = {
    ("HCCL_EXEC_TIMEOUT", "first"): Variable("HCCL_EXEC_TIMEOUT", 1, 17340, step=68),
    ("HCCL_RDMA_TIMEOUT", "A2"): Variable("HCCL_RDMA_TIMEOUT", 5, 20),
    ("HCCL_RDMA_TIMEOUT", "A3"): Variable("HCCL_RDMA_TIMEOUT", 5, 20),
}
OTHERS = (
    "HCCL_ALGO", "HCCL_DEBUG_CONFIG", "HCCL_DFS_CONFIG", "HCCL_DIAGNOSE_ENABLE", "HCCL_ENTRY_LOG_ENABLE", "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_INTER_HCCS_DISABLE", "HCCL_LOGIC_SUPERPOD_ID", "HCCL_MULTI_QP_THRESHOLD", "HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_OP_RETRY_ENABLE",
    "HCCL_OP_RETRY_PARAMS", "HCCL_P2P_DISABLE", "HCCL_RDMA_PCIE_DIRECT_POST_NOSTRICT", "HCCL_RDMA_QP_PORT_CONFIG_PATH",
    "HCCL_RDMA_QPS_PER_CONNECTION", "HCCL_SOCKET_IFNAME", "HCCL_TYPE", "HCCL_WHITELIST_FILE",
)  # fmt: skip
"""Variables that exist, whose values no table row can judge."""
KNOWN = (*(variable.name for variable in VARIABLES), *OTHERS)


def generation(npus: Iterable[Npu]) -> str | None:
    """Which of the generations these devices are of; None if there are none, or unknown or mixed ones."""
    found = {_generation(npu.name) for npu in npus}
    return found.pop() if len(found) == 1 else None


def _generation(name: str) -> str | None:
    if re.fullmatch(r"910B[1-4].*", name):
        return "A2"
    if re.fullmatch(r"Ascend910|910_93\d*", name):
        return "A3"
    return "first" if re.fullmatch(r"910(A|B|Pro[AB]|Premium[AB])", name) else None


def variable_for(variable: Variable, kind: str | None) -> Variable:
    """The row that holds for a generation of devices."""
    return BY_GENERATION.get((variable.name, kind or ""), variable)
