"""AdamW against torch.optim.AdamW, the loss scale, and dropout's masks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, Tensor

from train.communication import Group
from train.dropout import DropoutKey, KeyedDropout, reference_mask
from train.loss_scale import LossScale
from train.optimizer import AdamW, AdamWSettings

ALONE = Group((0,))
SHAPES = {"layers.0.mlp.up_proj.weight": (5, 7), "layers.0.mlp.up_proj.bias": (5,), "final_norm.gamma": (7,)}


@pytest.mark.parametrize("dtype", [ms.float32, ms.bfloat16])
def test_ten_updates_are_pytorchs_with_a_float32_master_and_no_decay_of_norms_and_biases(dtype: ms.Type) -> None:
    random = np.random.default_rng(0)
    values = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    ours = [Parameter(Tensor(value, dtype), name=name) for name, value in values.items()]
    theirs = [torch.from_numpy(value.copy()).requires_grad_() for value in values.values()]
    groups = [{"params": [theirs[0]], "weight_decay": 0.2}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.9), eps=1e-5)
    optimizer = AdamW(ours, AdamWSettings(0.8, 0.9, 1e-5, 0.2), values, ALONE, 0, shard=False)
    for number in range(1, 11):
        gradients = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()]
        optimizer.step(tuple(Tensor(gradient) for gradient in gradients), 0.5, 0.01 * number, number)
        for group in reference.param_groups:
            group["lr"] = 0.01 * number
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient * 0.5)
        reference.step()
    for target, weight, wanted in zip(optimizer.targets, ours, theirs, strict=True):
        np.testing.assert_allclose(target.asnumpy(), wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            weight.float().asnumpy(), wanted.detach().numpy(), rtol=1e-2 if dtype == ms.bfloat16 else 1e-5, atol=1e-2
        )


def test_the_loss_scale_doubles_after_its_window_and_halves_at_an_overflow() -> None:
    scale = LossScale(1024.0, window=3, dynamic=True)
    seen = []
    for overflow in [False, False, False, False, True, False, False, False, True, True]:
        scale = scale.after(overflow)
        seen.append(scale.scale)
    assert seen == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048, 1024, 512]
    assert LossScale().after(True) == LossScale()


def test_dropout_masks_follow_from_the_key_alone_and_keep_as_many_as_they_should() -> None:
    key = DropoutKey(seed=3, data_rank=1)
    cell = KeyedDropout(0.3, 17, key.parameter)
    cell.set_train(True)
    x = np.random.default_rng(0).standard_normal((3, 40, 50)).astype(np.float32)
    kept = []
    for step, micro_batch in [(5, 0), (5, 1), (6, 0), (5, 0)]:
        key.begin(step)
        key.choose(micro_batch)
        found = cell(Tensor(x)).asnumpy()
        mask = reference_mask(x.shape, 0.3, 17, int(key.parameter.asnumpy()) & 0xFFFFFFFF)
        np.testing.assert_array_equal(found != 0, mask)
        np.testing.assert_allclose(found[mask], x[mask] / 0.7, rtol=1e-6)
        assert mask.mean() == pytest.approx(0.7, abs=0.02)
        kept.append(mask)
    assert (kept[0] == kept[3]).all()
    assert all((kept[0] == other).mean() == pytest.approx(0.58, abs=0.03) for other in kept[1:3])
    cell.set_train(False)
    np.testing.assert_array_equal(cell(Tensor(x)).asnumpy(), x)
