"""TrainConfig: everything that a training run is told, read from a TOML file and `--set table.key=value`.

A file has one table for each class below. `ms-train settings` prints every key with its default, its bounds and its meaning. Paths are
relative to the working directory. This module imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from converter.untrusted import opened
from mappings.errors import Problem, Refused, refuse
from train.settings import TableReader, setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FloatType = Literal["float32", "bfloat16", "float16"]
MAX_CONFIG_BYTES = 1 << 20
MAX_MICRO_BATCHES = 1 << 20
FROM_CONFIG = "from config"


@dataclass(frozen=True)
class ModelSettings:
    """[model]"""

    path: str = setting("where the weights are: a Hugging Face folder, the output of hf2ms, or a checkpoint of ms-train")
    rules: str | None = setting("a rule table of your own (TOML), for a family that is not bundled", None)
    tie_embeddings: bool | None = setting("overrules the config of a Hugging Face folder where it contradicts the files", None)


@dataclass(frozen=True)
class DataSettings:
    """[data]"""

    path: str = setting("the folder that `ms-train prepare-data` wrote")
    validation_path: str | None = setting("another such folder, for the validation loss", None)
    seq_length: int | None = setting(
        "tokens that a sequence predicts; left out: what the data was prepared with", None, low=1, high=1 << 22
    )
    shuffle: bool = setting("a new order of the sequences in each epoch, from the seed", True)
    workers: int = setting("threads that read ahead", 2, low=1, high=256)


@dataclass(frozen=True)
class ParallelSettings:
    """[parallel]"""

    tp: int = setting("tensor-parallel ranks", 1, low=1, high=1 << 20)
    pp: int = setting("pipeline stages", 1, low=1, high=1 << 20)
    dp: int = setting("data-parallel ranks", 1, low=1, high=1 << 20)
    micro_batches: int = setting(
        "parts of a data-parallel rank's batch, one after the other (gradients add up); at least pp", 1, low=1, high=MAX_MICRO_BATCHES
    )
    layers_per_stage: tuple[int, ...] | None = setting("layers of each stage, as in [10, 10, 12]; left out: even", None, low=1, high=10_000)
    vocab_multiple: int | None = setting("pad the vocabulary to a multiple of this, as hf2ms does", None, low=1, high=1 << 20)
    optimizer_sharding: bool = setting("each data-parallel rank keeps a part of the optimizer's state", False)


@dataclass(frozen=True)
class OptimizerSettings:
    """[optimizer]: AdamW. Weight decay leaves norms and biases alone."""

    learning_rate: float = setting("the peak, after warm-up", 1e-4, low=0.0, high=1e3)
    betas: tuple[float, float] = setting("decay of the moment estimates", (0.9, 0.95), low=0.0, high=0.999999999)
    eps: float = setting("added to the root of the second moment", 1e-8, low=1e-20, high=1.0)
    weight_decay: float = setting("decoupled from the gradient", 0.1, low=0.0, high=1e3)
    clip_norm: float = setting("global norm that gradients are scaled down to; 0: none", 1.0, low=0.0, high=1e9)
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "how the learning rate falls after warm-up, down to min_learning_rate", "cosine"
    )
    warmup_steps: int = setting("steps over which the learning rate grows from 0 to its peak", 0, low=0, high=1 << 40)
    min_learning_rate: float = setting("where cosine and linear end, after the last step", 0.0, low=0.0, high=1e3)
    scale_by_sqrt_dp: bool = setting("multiply every learning rate by the square root of dp", False)


@dataclass(frozen=True)
class TrainSettings:
    """[train]"""

    steps: int = setting("optimizer steps in all, those before a --resume included", low=1, high=1 << 40)
    global_batch: int = setting("sequences of one step, over all data-parallel ranks and micro-batches", low=1, high=1 << 30)
    seed: int = setting("of the order of the data and of dropout", 0, low=0, high=(1 << 32) - 1)
    recompute_every: int = setting(
        "keep the activations of every k-th layer only and compute the others again; 0: keep all", 0, low=0, high=10_000
    )
    dropout: float | None = setting(
        f'every dropout probability of the model; left out or "{FROM_CONFIG}": the model\'s own', None, low=0.0, high=0.999
    )
    engine: Literal["spmd", "semi_auto"] = setting(
        "what makes a step parallel. spmd: collectives of our own, on a CPU and on Ascend. semi_auto: MindSpore's parallel compiler, "
        "on Ascend; on a CPU with one rank only",
        "spmd",
    )
    mode: Literal["graph", "pynative"] = setting("graph compiles the step; pynative runs operator by operator, to debug", "graph")


@dataclass(frozen=True)
class PrecisionSettings:
    """[precision]: what weights and activations are. Master weights, optimizer state, norms, softmax and loss are float32."""

    kind: FloatType = setting("of the weights", "float32")
    compute: FloatType | None = setting("of the activations; left out: as the weights, but float32 where a CPU has no bfloat16", None)
    loss_scale: float = setting("float16: the first loss scale", 65536.0, low=1.0, high=2.0**40)
    loss_scale_window: int = setting(
        "float16: steps without overflow after which it doubles; an overflow halves it", 1000, low=1, high=1 << 30
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """[checkpoint]"""

    folder: str = setting("where checkpoints go", "checkpoints")
    every: int = setting("steps between checkpoints; 0: at the end only", 0, low=0, high=1 << 40)
    keep: int = setting("how many of the newest stay; 0: all", 2, low=0, high=1 << 20)
    format: Literal["safetensors", "ckpt"] = setting("format of rank files", "safetensors")
    writers: int = setting("ranks that write at the same time, the others waiting for their turn; 0: all at once", 0, low=0, high=1 << 20)
    resume: bool = setting("go on from the newest checkpoint in the folder (--resume)", False)


@dataclass(frozen=True)
class WatchSettings:
    """[watch]"""

    folder: str = setting("where metrics.jsonl, TensorBoard's files, profiles and the batch of a failed step go", "watch")
    log_every: int = setting("steps between the lines of a log", 1, low=1, high=1 << 40)
    validate_every: int = setting("steps between validation losses; 0: none", 0, low=0, high=1 << 40)
    validation_batches: int = setting("global batches of one validation; 0: the whole validation set", 0, low=0, high=1 << 40)
    tensorboard: bool = setting("write TensorBoard's files, if tensorboardX or torch.utils.tensorboard is installed", True)
    profile: bool = setting("wrap the run in mindspore.Profiler", False)
    check_start: str | None = setting(
        "a Hugging Face folder; a fresh run must have the loss that Transformers has on the first batch (--check-start)",
        None,
    )


@dataclass(frozen=True)
class LaunchSettings:
    """[launch]: processes and hosts. Bounds of HCCL's variables: CANN's environment variable reference."""

    device: Literal["cpu", "ascend"] = setting("what the ranks run on", "cpu")
    nnodes: int = setting("hosts, each with the same number of ranks", 1, low=1, high=1 << 20)
    node_rank: int | None = setting(
        "number of this host, from 0; needed with several, for ranks own their slices by number", None, low=0, high=1 << 20
    )
    master_addr: str = setting("address of host 0", "127.0.0.1")
    master_port: int | None = setting(
        "port of the scheduler on host 0; left out: a free one, or 8118 with several hosts", None, low=1024, high=65535
    )
    cluster_timeout: int = setting("seconds that the ranks wait for each other to start", 600, low=1, high=1 << 20)
    node_timeout: int | None = setting(
        "MS_NODE_TIMEOUT in seconds; left out: the environment's, else 900 for more than 128 ranks, 600 on CPUs", None, low=1, high=1 << 20
    )
    log_folder: str = setting("logs of the ranks, a sub-folder for each launch", "logs")
    hccl_connect_timeout: int | None = setting("HCCL_CONNECT_TIMEOUT in seconds", None, low=120, high=7200)
    hccl_exec_timeout: int | None = setting("HCCL_EXEC_TIMEOUT in seconds", None, low=0, high=2147483647)
    hccl_rdma_timeout: int | None = setting("HCCL_RDMA_TIMEOUT, 4.096 us times 2 to this power", None, low=5, high=20)
    hccl_if_base_port: int | None = setting(
        "HCCL_IF_BASE_PORT: the first of the ports that HCCL uses on the host", None, low=1024, high=65520
    )
    hccl_buffsize: int | None = setting("HCCL_BUFFSIZE in MB, for each communication group", None, low=1, high=1 << 20)
    hccl_socket_ifname: str | None = setting("HCCL_SOCKET_IFNAME: network interfaces of the host", None)
    hccl_socket_family: Literal["AF_INET", "AF_INET6"] | None = setting("HCCL_SOCKET_FAMILY; only with hccl_socket_ifname", None)
    hccl_deterministic: bool = setting("HCCL_DETERMINISTIC: the same order of additions in every run", False)


@dataclass(frozen=True)
class TrainConfig:
    """A run. Every value is within the bounds of its setting; whether they fit one another and the model, `config_checks` says."""

    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings
    optimizer: OptimizerSettings
    train: TrainSettings
    precision: PrecisionSettings
    checkpoint: CheckpointSettings
    watch: WatchSettings
    launch: LaunchSettings

    @property
    def ranks(self) -> int:
        return self.parallel.tp * self.parallel.pp * self.parallel.dp

    @property
    def rank_batch(self) -> int:
        """Sequences of one data-parallel rank in one step."""
        return self.train.global_batch // self.parallel.dp

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch."""
        return self.rank_batch // self.parallel.micro_batches

    @property
    def compute(self) -> FloatType:
        """Element type of the activations."""
        if self.precision.compute is not None:
            return self.precision.compute
        return "float32" if self.precision.kind == "bfloat16" and self.launch.device == "cpu" else self.precision.kind


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config in a TOML file. Each override is `table.key=value`, the value in TOML's spelling or a bare text.

    Raises Refused with every unknown table and key, missing key, wrong type and value out of bounds at once.
    """
    data, origins, problems = read_toml(path), {}, []
    for override in overrides:
        problem = _apply(override, data)
        if problem is None:
            origins[override.partition("=")[0].strip()] = "--set"
        else:
            problems.append(problem)
    dropout = data.get("train", {}) if isinstance(data.get("train"), dict) else {}
    if dropout.get("dropout") == FROM_CONFIG:
        del dropout["dropout"]
    reader = TableReader(path.name, origins)
    config = reader.read(TrainConfig, data)
    if problems or config is None:
        raise Refused("the configuration cannot be used", [*problems, *reader.problems])
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML document of a bounded size. Raises Refused."""
    with opened(path) as (descriptor, size):
        if size > MAX_CONFIG_BYTES:
            raise refuse(f"larger than {MAX_CONFIG_BYTES >> 20} MiB", str(path), "this is no configuration")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(f"not valid TOML: {str(error)[:300]}", str(path), "mend the TOML") from error


def _apply(override: str, data: dict[str, Any]) -> Problem | None:
    """Put an override into the document, or say what is wrong with it."""
    name, equals, text = override.partition("=")
    table, dot, key = name.strip().partition(".")
    tables = [field.name for field in fields(TrainConfig)]
    if not (equals and dot and key) or table not in tables:
        return Problem(
            "not of the form table.key=value",
            f"--set {override[:80]}",
            f"for example optimizer.learning_rate=1e-4; tables: {', '.join(tables)}",
        )
    section = data.setdefault(table, {})
    if isinstance(section, dict):  # if not, reading says so
        section[key] = _toml_value(text.strip())
    return None


def _toml_value(text: str) -> Any:
    """A value in TOML's spelling; anything else is a text."""
    try:
        document: Mapping[str, Any] = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return document["value"] if len(document) == 1 else text
