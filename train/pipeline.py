"""A pipeline stage at work: forward and backward over the micro-batches of a step, gradients added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from model.stage import DecoderStage
from train.communication import Groups, PointToPoint
from train.dropout import DropoutKey
from train.pipeline_order import one_forward_one_backward

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class MicroBatch:
    """ids and labels [sequences, seq] int32; a label is the token that its position predicts, or IGNORED (model/loss.py)."""

    ids: Tensor
    labels: Tensor


class _ScaledLoss(nn.Cell):
    """The loss times a factor, which is what is differentiated, and the loss itself."""

    def __init__(self, stage: DecoderStage) -> None:
        super().__init__(auto_prefix=False)
        self.stage = stage

    def construct(self, x: Tensor, labels: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.stage(x, labels)
        return loss * factor, loss


class LossAndGradients(nn.Cell):
    """The last stage, forward and backward at once. -> loss, gradient of x (empty where x is ids), gradients of the weights."""

    def __init__(self, stage: DecoderStage, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.takes_ids = stage.first
        self.scaled = _ScaledLoss(stage)
        self.differentiate = ms.value_and_grad(self.scaled, None if stage.first else 0, weights, has_aux=True)

    def construct(self, x: Tensor, labels: Tensor, factor: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Gradients]:
        (_, loss), found = self.differentiate(x, labels, factor)
        if self.takes_ids:
            return loss, (), found
        return loss, (found[0],), found[1]


class StageGradients(nn.Cell):
    """The backward pass of a stage before the last: computes forward again, so that between the two it keeps its input only."""

    def __init__(self, stage: DecoderStage, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.takes_ids = stage.first
        self.stage = stage
        self.weights = weights
        self.differentiate = ops.GradOperation(get_all=not stage.first, get_by_list=True, sens_param=True)

    def construct(self, x: Tensor, gradient: Tensor) -> tuple[tuple[Tensor, ...], Gradients]:
        found = self.differentiate(self.stage, self.weights)(x, gradient)
        if self.takes_ids:
            return (), found
        return (found[0][0],), found[1]


class AddGradients(nn.Cell):
    """Adds the gradients of a micro-batch, in float32, to those of the ones before."""

    def construct(self, total: Gradients, more: Gradients) -> Gradients:
        result: Gradients = ()
        for index in range(len(total)):
            result += (ops.cast(total[index], ms.float32) + ops.cast(more[index], ms.float32),)
        return result


class Pipeline:
    """This rank's stage and its connections.

    `run` is called by all ranks at once and returns when the whole step's forward and backward passes are done.
    """

    def __init__(self, stage: DecoderStage, groups: Groups) -> None:
        self.stage, self.groups = stage, groups
        self.stages = groups.model.size // groups.tensor.size
        self.weights = ParameterTuple(stage.trainable_params())
        rank = groups.place.rank
        self._previous = PointToPoint(groups.previous, rank) if groups.previous is not None else None
        self._next = PointToPoint(groups.next, rank) if groups.next is not None else None
        self._finish = LossAndGradients(stage, self.weights) if stage.last else None
        self._backward = None if stage.last else StageGradients(stage, self.weights)
        self._add = AddGradients()
        self.dropout: DropoutKey | None = None
        self._newest: Tensor | None = None

    def run(self, micro_batches: Sequence[MicroBatch], factor: Tensor) -> tuple[Gradients, float]:
        """Gradients, in the order of `weights`, of `factor` times the summed loss of these micro-batches, and that loss.

        The gradients are this rank's: they are not yet summed over those that share a parameter (train/gradients.py). The loss is 0 but on
        the last stage.
        """
        place = self.groups.place
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        arriving: dict[int, Tensor] = {}
        leaving: dict[int, Tensor] = {}
        total: Gradients | None = None
        losses: list[Tensor] = []
        for event in one_forward_one_backward(place.stage, self.stages, len(micro_batches)):
            index = event.micro_batch
            batch = micro_batches[index]
            if event.action == "receive_forward":
                inputs[index] = self._receive(self._previous, batch)
            elif event.action == "forward":
                inputs.setdefault(index, batch.ids)
                if self._finish is None:
                    self._choose_dropout(index)
                    outputs[index] = self._newest = self.stage(inputs[index])
            elif event.action == "send_forward":
                self._send(self._next, outputs.pop(index))
            elif event.action == "receive_backward":
                arriving[index] = self._receive(self._next, batch)
            elif event.action == "backward":
                self._choose_dropout(index)
                loss, towards_input, found = self._go_back(inputs.pop(index), batch, arriving.pop(index, None), factor)
                losses += loss
                self._newest = found[0]
                total = found if total is None else self._add(ms.mutable(total), ms.mutable(found))
                if towards_input:
                    leaving[index] = towards_input[0]
            else:
                self._send(self._previous, leaving.pop(index))
        assert total is not None, "there is a micro-batch"
        return total, sum(float(loss.asnumpy()) for loss in losses)

    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The summed loss without a backward pass; 0 but on the last stage."""
        total = 0.0
        for batch in micro_batches:
            x = batch.ids if self._previous is None else self._receive(self._previous, batch)
            if self.stage.last:
                total += float(self.stage(x, batch.labels).asnumpy())
            else:
                self._send(self._next, self.stage(x))
        return total

    def _choose_dropout(self, micro_batch: int) -> None:
        """The same for the forward pass of a micro-batch and for the one that its backward pass repeats."""
        if self.dropout is not None:
            if self._newest is not None:
                self._newest.asnumpy()  # waits for whatever may still read the key of the micro-batch before
            self.dropout.choose(micro_batch)

    def _go_back(
        self, x: Tensor, batch: MicroBatch, arrived: Tensor | None, factor: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor, ...], Gradients]:
        if self._finish is not None:
            loss, towards_input, found = self._finish(x, batch.labels, factor)
            return [loss], towards_input, found
        assert self._backward is not None and arrived is not None, "a stage before the last receives its gradient"
        towards_input, found = self._backward(x, arrived)
        return [], towards_input, found

    def _receive(self, connection: PointToPoint | None, batch: MicroBatch) -> Tensor:
        assert connection is not None, "the order names messages between neighbours only"
        return connection.receive((*batch.ids.shape, self.stage.config.hidden), self.stage.compute_type)

    @staticmethod
    def _send(connection: PointToPoint | None, x: Tensor) -> None:
        assert connection is not None, "the order names messages between neighbours only"
        connection.send(x)
