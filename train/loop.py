"""A training run on one rank, from its start or a checkpoint to its last step."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

from converter.folder_lock import PROGRESS_FOLDER, FolderLock
from mappings.errors import Refused, refuse
from model.config import ModelConfig
from train.checkpoint import resume, save_checkpoint
from train.communication import Groups, check_rank, make_groups
from train.config import ModelSettings, TrainConfig
from train.data_index import read_index
from train.dropout import attach_dropout
from train.first_loss import check_start, note_on_first_loss
from train.loader import SequenceLoader, open_loader, validation_batches
from train.loss_scale import LossScale
from train.metrics import StepMetrics
from train.model_source import read_model_source
from train.optimizer import AdamWSettings
from train.schedule import learning_rate
from train.semi_auto import AnyTrainer, SemiAutoTrainer, set_parallel_mode
from train.start import Start, read_start
from train.step import StepSettings, Trainer, labels_of
from train.training_state import Progress, Schedule, differences, latest_checkpoint
from train.watch import Watch, profiled

LOCKS_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that keeps no locks."""


def run(config: TrainConfig) -> int:
    """Train as this process's rank: of the job that msrun started, or alone. The config was checked (train/config_checks.py).

    Returns:
        The process's exit code: 0; 143 (SIGTERM) or 130 (Ctrl-C) when a run without msrun was asked to end and has saved. (Under msrun
        that is 0, and the launcher knows that it asked.)

    Raises:
        Refused: for a start that does not fit, a checkpoint folder that another run uses, and for a loss or gradient that is not finite.
        KeyboardInterrupt: at a second Ctrl-C.
    """
    rank, ranks = _join(config)
    with _asked_to_stop(alone="MS_ROLE" not in os.environ) as asked, _only_run(Path(config.checkpoint.folder), rank):
        run_of_rank = _prepare(config, rank, ranks)
        try:
            check_start(config, run_of_rank.trainer, run_of_rank.watch, run_of_rank.progress.step)
            with profiled(config, rank):
                stopped = _train(run_of_rank, asked)
        finally:
            run_of_rank.watch.close()
    return 128 + asked[0] if stopped and "MS_ROLE" not in os.environ else 0


@dataclass
class _Run:
    """Everything that a run on one rank needs. `progress` is where it stands."""

    config: TrainConfig
    trainer: AnyTrainer
    loader: SequenceLoader
    watch: Watch
    progress: Progress


def _join(config: TrainConfig) -> tuple[int, int]:
    """Set MindSpore up and join the other ranks; seeds come after, for `init` may reset them. -> this rank, number of ranks."""
    ms.set_device({"cpu": "CPU", "ascend": "Ascend"}[config.launch.device])
    ms.set_context(mode={"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}[config.train.mode])
    rank, ranks = 0, 1
    if config.ranks > 1:
        init()
        rank, ranks = get_rank(), get_group_size()
    ms.set_seed(config.train.seed)
    return rank, ranks


@contextmanager
def _asked_to_stop(alone: bool) -> Iterator[list[int]]:
    """Collects SIGTERM, and without a launcher the first Ctrl-C, instead of dying of it."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, *([signal.SIGINT] if alone else []))}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_run(folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 has the checkpoint folder to itself: two runs would remove each other's checkpoints. Raises Refused when another has it,
    and OSError when it cannot be written.
    """
    if rank:
        yield
        return
    lock = FolderLock(folder / PROGRESS_FOLDER / "lock", (0,))
    try:
        lock.open()
        _take(lock, folder)
        yield
    finally:
        lock.close()


def _take(lock: FolderLock, folder: Path) -> None:
    try:
        with lock.gate():
            lock.take()
    except Refused as refused:
        mend = "wait for it, or give another checkpoint.folder"
        raise refuse("another run saves its checkpoints here", f"checkpoint.folder: {folder}", mend) from refused
    except OSError as error:
        if error.errno not in LOCKS_UNKNOWN:
            raise


def _prepare(config: TrainConfig, rank: int, ranks: int) -> _Run:
    checkpoint = latest_checkpoint(Path(config.checkpoint.folder)) if config.checkpoint.resume else None
    settings = config.model if checkpoint is None else ModelSettings(str(checkpoint))
    start = read_start(read_model_source(settings), config.parallel)
    check_rank(start.layout, rank, ranks)
    start = replace(start, model=_with_dropout(start.model, config.train.dropout))
    groups = make_groups(start.layout, rank, start.model.kv_heads)
    trainer = _trainer(config, start, groups)
    progress = Progress(
        0, 0, config.train.seed, config.data.shuffle, read_index(Path(config.data.path)).digest, Schedule.of(config),
    )  # fmt: skip
    notes = [_origin(start)]
    if checkpoint is not None:
        saved = resume(trainer, checkpoint).progress
        problems, changes = differences(saved, progress)
        if problems:
            raise Refused(f"{checkpoint.name} cannot be continued so", problems)
        progress = replace(progress, step=saved.step, sample_offset=saved.sample_offset)
        notes = [f"resumed from {checkpoint} at step {saved.step}", *changes]
    if not trainer.agree(progress.step):
        what = f"this rank begins at step {progress.step}, others elsewhere: `latest` changed while the ranks started"
        raise refuse(what, f"checkpoint.folder: {config.checkpoint.folder}", "see that no other run saves there, and start again")
    trainer.steps = progress.step
    loader = open_loader(config, groups.place.data, progress.sample_offset)
    watch = Watch(config, rank, ranks, progress.step)
    for note in notes:
        watch.note(note)
    return _Run(config, trainer, loader, watch, progress)


def _trainer(config: TrainConfig, start: Start, groups: Groups) -> AnyTrainer:
    """The engine that the config names."""
    settings = step_settings(config)
    if config.train.engine == "semi_auto":
        if start.layout.ranks > 1:
            set_parallel_mode(start.layout, settings.optimizer_sharding)
        return SemiAutoTrainer(start, groups, settings, config.rank_batch, read_index(Path(config.data.path)).seq_length)
    trainer = Trainer(start, groups, settings, _loss_scale(config))
    trainer.pipeline.dropout = attach_dropout(trainer.stage, config.train.seed, groups)
    return trainer


def step_settings(config: TrainConfig) -> StepSettings:
    """What the config says of a step."""
    chosen = config.optimizer
    adamw = AdamWSettings(chosen.betas[0], chosen.betas[1], chosen.eps, chosen.weight_decay)
    return StepSettings(
        config.parallel.micro_batches, chosen.clip_norm, adamw, config.parallel.optimizer_sharding, config.precision.kind, config.compute,
        config.train.recompute_every,
    )  # fmt: skip


def _loss_scale(config: TrainConfig) -> LossScale:
    dynamic = "float16" in (config.precision.kind, config.compute)
    return LossScale(config.precision.loss_scale, config.precision.loss_scale_window, dynamic=True) if dynamic else LossScale()


def _with_dropout(model: ModelConfig, probability: float | None) -> ModelConfig:
    if probability is None:
        return model
    return replace(model, embedding_dropout=probability, attention_dropout=probability, hidden_dropout=probability)


def _origin(start: Start) -> str:
    model = start.model
    rates = {"embedding": model.embedding_dropout, "attention": model.attention_dropout, "hidden": model.hidden_dropout}
    dropped = ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate)
    return f"starts from {start.source.path} with a fresh optimizer; dropout {dropped or 'none'}"


def _train(run_of_rank: _Run, asked: list[int]) -> bool:
    """Every step that is left. -> whether the run was asked to stop before its end."""
    config = run_of_rank.config
    saved_at = run_of_rank.progress.step
    while run_of_rank.progress.step < config.train.steps:
        stop = _one_step(run_of_rank, bool(asked))
        done = run_of_rank.progress.step
        if config.watch.validate_every and done % config.watch.validate_every == 0:
            _validate(run_of_rank)
        if stop or done == config.train.steps or (config.checkpoint.every and done % config.checkpoint.every == 0):
            path = _save(run_of_rank)
            saved_at = done
            if stop and done < config.train.steps:
                run_of_rank.watch.note(f"asked to end: saved {path}")
                return True
            run_of_rank.watch.note(_saved(path, last=done == config.train.steps))
    if saved_at != run_of_rank.progress.step:
        run_of_rank.watch.note(_saved(_save(run_of_rank), last=True))
    return False


def _saved(path: Path, *, last: bool) -> str:
    return f"saved {path}" + (f"   next: ms-convert ms2hf {path} -o OUT" if last else "")


def _one_step(run_of_rank: _Run, asked: bool) -> bool:
    config, trainer, progress = run_of_rank.config, run_of_rank.trainer, run_of_rank.progress
    began = time.perf_counter()
    batch = next(run_of_rank.loader)
    rate = learning_rate(progress.step, config)
    scale = trainer.scale
    result = trainer.step(*labels_of(batch.ids, batch.mask), rate, asked)
    offset = batch.offset + config.train.global_batch
    metrics = StepMetrics(
        progress.step, result.loss, result.norm, rate, result.tokens, time.perf_counter() - began, offset,
        scale.scale if scale.dynamic else None, result.overflow, result.culprits,
    )  # fmt: skip
    try:
        run_of_rank.watch.step(metrics, batch)
    except Refused:
        trainer.wait_for_all()  # when the first rank fails the launcher ends the others, which are to have saved their batches too
        raise
    if progress.step == 0:
        note_on_first_loss(run_of_rank.watch, result.loss, trainer.start.model.vocab, compared=config.watch.check_start is not None)
    run_of_rank.progress = replace(progress, step=progress.step + 1, sample_offset=offset)
    return result.stop


def _validate(run_of_rank: _Run) -> None:
    config, trainer = run_of_rank.config, run_of_rank.trainer
    batches = [labels_of(batch.ids, batch.mask) for batch in validation_batches(config, trainer.groups.place.data)]
    run_of_rank.watch.validation(run_of_rank.progress.step, trainer.evaluate(batches))


def _save(run_of_rank: _Run) -> Path:
    settings = run_of_rank.config.checkpoint
    return save_checkpoint(
        run_of_rank.trainer, Path(settings.folder), run_of_rank.progress, keep=settings.keep, file_format=settings.format,
        writers=settings.writers,
    )  # fmt: skip
