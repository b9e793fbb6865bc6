"""Training in PyTorch, written out by hand: what the trainer must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def without_dropout(model: Any) -> Any:
    """The model in training mode with every dropout at 0."""
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def mean_loss(model: Any, rows: npt.NDArray[np.int32], mask: npt.NDArray[np.int32] | None = None) -> torch.Tensor:
    """Cross entropy of each next token, averaged over the tokens that `mask` has, rows [n, seq + 1]."""
    ids = torch.from_numpy(rows.astype(np.int64))
    logits = model(ids[:, :-1]).logits.float()
    labels = ids[:, 1:].clone()
    if mask is not None:
        labels[torch.from_numpy(mask[:, 1:] == 0)] = -100
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def train(
    model: Any,
    steps: npt.NDArray[np.int32],
    rates: Sequence[float],
    *,
    decay: float,
    clip: float,
    mask: npt.NDArray[np.int32] | None = None,
) -> tuple[list[float], list[float]]:
    """torch.optim.AdamW over `steps` [steps, batch, seq + 1]; norms and biases do not decay.

    -> losses, and gradient norms before clipping.
    """
    model = without_dropout(model)
    parameters = list(model.parameters())
    groups = [
        {"params": [item for item in parameters if item.ndim > 1], "weight_decay": decay},
        {"params": [item for item in parameters if item.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for index, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = mean_loss(model, steps[index], None if mask is None else mask[index])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
