"""A rank's trainer under MindSpore's own parallel compiler: what train/step.py's Trainer is under explicit collectives.

The whole model is declared on every rank; strategies (model/shard.py) and stages say how it is cut, and compiling leaves the rank its
slices. Then they are filled from the converter's, name by name. Weights are float32 and their own master weights, activations of the
compute type; a checkpoint stores the weights in the run's type and, where that is narrower, the exact ones beside the optimizer's state.

Alone, without a parallel mode, it runs on any device. On several ranks it needs Ascend: the compiler has no CPU backend.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.communication import get_group_rank_from_world_rank, get_group_size
from mindspore.mint import distributed

from converter.layout import ParallelLayout
from mappings.errors import Problem, Refused, refuse
from model.config import ModelConfig
from model.loss import IGNORED
from model.shard import shard_decoder
from model.stage import DecoderStage, Stage, build_stage
from train.communication import Groups
from train.loss_scale import LossScale
from train.semi_auto_cell import TrainStep, loss_network, set_stages
from train.start import Start
from train.step import StepResult, StepSettings, Tokens, Trainer, base_4096

Array = np.ndarray[Any, np.dtype[Any]]
TIED = "embedding.tokens.embedding_table"
_NO_KERNEL = re.compile(r"Unsupported op \[(\w+)\] on (\w+)")
FUSED = ("allreduce", "allgather", "reducescatter")


def set_parallel_mode(layout: ParallelLayout, optimizer_sharding: bool, strategy_file: str | None = None) -> None:
    """Turn the parallel compiler on for this process, after `init()`. `strategy_file`: where it writes how it cut each parameter.

    MindSpore 2.10 offers `mindspore.parallel.auto_parallel.AutoParallel` beside this call. It sets the same context around a wrapped cell;
    the call is used because a training cell can then be compiled, filled and run in three steps.
    """
    options: dict[str, Any] = {}
    if strategy_file is not None:
        options["strategy_ckpt_config"] = {"save_file": strategy_file}
    if optimizer_sharding:  # MindSpore leaves small parameters out unless told otherwise; a rank tree's strategy files make no difference
        options["parallel_optimizer_config"] = {"parallel_optimizer_threshold": 0}
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        pipeline_stages=layout.pp,
        dataset_strategy=((layout.dp, 1), (layout.dp, 1)),
        enable_parallel_optimizer=optimizer_sharding and layout.dp * layout.tp > 1,
        comm_fusion={kind: {"mode": "auto", "config": None} for kind in FUSED},
        **options,
    )


def declare_decoder(model: ModelConfig, layout: ParallelLayout, settings: StepSettings) -> DecoderStage:
    """The whole decoder with strategies, stages and recomputation declared. Raises Refused for what the compiler cannot be told to cut."""
    decoder = build_stage(model, Stage(range(model.layers)), compute=settings.compute)
    shard_decoder(decoder, layout.dp, layout.tp)
    if layout.pp > 1:
        set_stages(decoder, layout.layers_per_stage)
    place = 0
    for index, layer in enumerate(decoder.layers):
        place = 0 if index and layout.stage_of_layer(index) != layout.stage_of_layer(index - 1) else place
        if settings.recompute_every and place % settings.recompute_every:
            layer.recompute()
        place += 1
    return decoder


def training_cell(decoder: DecoderStage, layout: ParallelLayout, settings: StepSettings, stage: int = 0) -> TrainStep:
    """The step of a declared decoder, for a rank of the pipeline stage `stage`.

    The compiler sends a tied table to the last stage and the gradient of its use there back to the first, where both uses' are added up.
    """
    network = loss_network(decoder, settings.micro_batches, layout.pp)
    sharding = settings.optimizer_sharding and layout.dp * layout.tp > 1
    compiler_accumulates = settings.micro_batches > 1 and layout.ranks > 1
    elsewhere = (TIED,) if decoder.tied and stage else ()
    cell = TrainStep(network, settings.adamw, settings.clip_norm, compiler_accumulates, sharding, elsewhere)
    cell.set_train()
    return cell


@dataclass(frozen=True)
class State:
    """A float32 parameter under the name that it has in a checkpoint."""

    name: str
    parameter: Parameter

    @property
    def dtype(self) -> ms.Type:
        return self.parameter.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def asnumpy(self) -> Array:
        values: Array = self.parameter.asnumpy()
        return values

    def set_data(self, value: Tensor) -> None:
        """Replace the values by those of a tensor of the same shape."""
        self.parameter.set_data(value, slice_shape=True)


class SemiAutoOptimizer:
    """The states of a compiled step, as a checkpoint has them."""

    def __init__(self, cell: TrainStep, held: Mapping[str, Parameter], keep_masters: bool) -> None:
        self._cell, self._held, self._keep_masters = cell, held, keep_masters

    def states(self) -> list[State]:
        """What a checkpoint needs besides the weights."""
        optimizer = self._cell.optimizer
        kept = [State(state.name, state) for state in (*optimizer.m, *optimizer.v) if state.name.split(".", 1)[1] in self._held]
        if self._keep_masters:
            kept += [State(f"master.{name}", parameter) for name, parameter in self._held.items()]
        return kept


class SemiAutoTrainer:
    """A rank's part of a compiled step. Every method but `weights` on a single rank is called by all ranks at once.

    The parallel mode must be on (`set_parallel_mode`) where there are several ranks.
    """

    def __init__(self, start: Start, groups: Groups, settings: StepSettings, sequences: int, seq: int) -> None:
        """`sequences` of `seq` tokens each are this rank's part of a global batch: the shape that is compiled."""
        self.start, self.groups, self.settings = start, groups, settings
        self.scale = LossScale()
        self.updates = 0
        self.steps = 0
        self.pipeline = SimpleNamespace(dropout=None)
        self.stage = declare_decoder(start.model, start.layout, settings)
        self.cell = training_cell(self.stage, start.layout, settings, groups.place.stage)
        compile_cell(self.cell, sequences, seq)
        self._held = self._held_parameters()
        fill(self._held, start.parameters(groups.place.rank), self._cuts())
        self.optimizer = SemiAutoOptimizer(self.cell, self._held, settings.parameters != "float32")
        self.token = self._agree_on_token()

    def step(self, ids: Tokens, labels: Tokens, learning_rate: float, stop: bool = False) -> StepResult:
        """Train on this data-parallel rank's part of a global batch, [sequences, seq] each: the mean over all labelled tokens of it."""
        place = self.groups.place
        counts = place.stage == self.start.layout.pp - 1 and place.tensor == 0
        tokens = int(np.count_nonzero(labels != IGNORED)) if counts else 0
        summed = self._sum([float(tokens >> 12), float(tokens & 0xFFF), float(stop)])  # digits that float32 adds exactly
        total = int(summed[0]) * (1 << 12) + int(summed[1])
        self.steps += 1
        self.updates += 1
        self.cell.prepare(1 / max(total, 1), learning_rate, self.updates)
        loss, norm = self.cell(Tensor(ids, ms.int32), Tensor(labels, ms.int32))
        # The compiled loss is that of the whole global batch, on each rank of the last stage
        (loss_sum,) = self._sum([float(loss.asnumpy()) if counts and place.data == 0 else 0.0])
        mean, length = loss_sum / max(total, 1), float(norm.asnumpy().reshape(-1)[0])
        return StepResult(mean, length, total, False, math.isfinite(mean) and math.isfinite(length), summed[2] > 0)

    def evaluate(self, batches: Sequence[tuple[Tokens, Tokens]]) -> float:
        """The mean loss over all labelled tokens of these batches, without dropout. On one rank only (train/config_checks.py)."""
        self.stage.set_train(False)
        loss = sum(float(self.stage(Tensor(ids, ms.int32), Tensor(labels, ms.int32)).asnumpy()) for ids, labels in batches)
        self.stage.set_train(True)
        tokens = sum(int(np.count_nonzero(labels != IGNORED)) for _, labels in batches)
        return loss / tokens if tokens else math.nan

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        self._sum([0.0])

    def agree(self, number: int) -> bool:
        """Whether every rank calls this with the same number; False on one rank at least where they do not."""
        digits = base_4096(number)
        return list(self._sum(digits)) == [digit * self.start.layout.ranks for digit in digits]

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's slices by canonical name, in the type that the run stores, without the optimizer's cut of them."""
        kind = getattr(ms, self.settings.parameters)
        found = {name: ops.cast(self._whole(parameter), kind) for name, parameter in self._held.items()}
        layout, place = self.start.layout, self.groups.place
        if self.start.model.tied and layout.pp > 1 and place.stage in (0, layout.pp - 1):
            found[TIED] = self._tied(found.get(TIED), kind)
        return found

    def _held_parameters(self) -> dict[str, Parameter]:
        """The weights of this rank's stage by canonical name; of a tied table's two stages the compiler keeps it on the first."""
        layout, stage = self.start.layout, self.groups.place.stage
        names = [
            item.name
            for item in self.start.expansion.parameters.values()
            if layout.stages_of(item.parameter, item.layer, self.start.model.tied)[0] == stage
        ]
        weights = {weight.name: weight for weight in self.cell.weights}
        return {name: weights[name] for name in names}

    def _cuts(self) -> dict[str, tuple[int, int]]:
        """For each parameter that the compiler divided once more for its optimizer: this rank's part of axis 0, and the number of parts."""
        rank, found = self.groups.place.rank, {}
        for name in self._held:
            layout = self.cell.parameter_layout_dict.get(name)
            group = layout[5] if layout is not None else ""
            if group:
                found[name] = (get_group_rank_from_world_rank(rank, group), get_group_size(group))
        return found

    def _whole(self, parameter: Parameter) -> Tensor:
        layout = self.cell.parameter_layout_dict.get(parameter.name)
        if layout is None or not layout[5]:
            return parameter
        ranks = get_group_size(layout[5])
        result = Tensor(np.empty((parameter.shape[0] * ranks, *parameter.shape[1:]), np.float32))
        distributed.all_gather_into_tensor(result, parameter, group=layout[5])
        return result

    def _tied(self, table: Tensor | None, kind: ms.Type) -> Tensor:
        """The first stage's table on the last, too: a sum in which the last has negative zeros, which change no value."""
        (piece,) = (piece for item, piece in self.start.slices(self.groups.place.rank) if item.name == TIED)
        shape = piece.shape((self.start.model.vocab, self.start.model.hidden))
        shared = Tensor(np.full(shape, -0.0, np.float32)) if table is None else ops.cast(table, ms.float32)
        assert self.groups.ends is not None, "first and last stage have one"
        distributed.all_reduce(shared, group=self.groups.ends.name)
        return ops.cast(shared, kind)

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        summed = Tensor(np.array(values, np.float32))
        if self.groups.world.size > 1:
            distributed.all_reduce(summed)
        return [float(value) for value in summed.asnumpy()]

    def _agree_on_token(self) -> int:
        """A random number below 2^20, the same on every rank: two runs with equal settings get different ones."""
        return int(self._sum([float(secrets.randbelow(1 << 20)) if self.groups.place.rank == 0 else 0.0])[0])


AnyTrainer: TypeAlias = Trainer | SemiAutoTrainer
"""A rank's trainer under either engine."""


def compile_cell(cell: TrainStep, sequences: int, seq: int) -> None:
    """Compile a step for inputs [sequences, seq]. Raises Refused when the device lacks an operator of the model."""
    example = Tensor(np.zeros((sequences, seq), np.int32))
    try:
        cell.compile(example, example)
    except RuntimeError as error:
        unknown = _NO_KERNEL.search(str(error))
        if unknown is None:
            raise
        mend = "use the MindSpore and CANN versions of the README's table; `ms-convert doctor` shows what is installed"
        raise refuse(f"the operator {unknown.group(1)} has no kernel on {unknown.group(2)}", "the compiled model", mend) from error


def fill(held: Mapping[str, Parameter], arrays: Iterable[tuple[str, Array]], cuts: Mapping[str, tuple[int, int]]) -> None:
    """Fill a rank's compiled parameters from its slices; those in `cuts` with (part, parts) of axis 0 only.

    A slice that no parameter takes is refused, but for a tied table, which the compiler keeps on the first stage.

    Raises Refused with every name that is missing or left over and every shape that does not fit.
    """
    missing, problems = set(held), []
    for name, array in arrays:
        parameter = held.get(name)
        if parameter is None:
            if name != TIED:
                problems.append(Problem("the compiled model has no such parameter on this rank", name))
            continue
        missing.discard(name)
        part, parts = cuts.get(name, (0, 1))
        rows = array.shape[0] // parts
        piece = np.ascontiguousarray(array[part * rows : (part + 1) * rows], dtype=np.float32)
        if piece.shape != tuple(parameter.shape) or array.shape[0] % parts:
            problems.append(Problem(f"the slice is {array.shape} in {parts} parts, the compiled parameter {tuple(parameter.shape)}", name))
            continue
        parameter.set_data(Tensor(piece), slice_shape=True)
    problems += [Problem("no slice fills it", name) for name in sorted(missing)]
    if problems:
        raise Refused("the slices do not fit what the compiler made of the model", problems[:20])
