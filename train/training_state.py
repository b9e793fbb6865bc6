"""Which checkpoint is the newest, and its `training.json`: where the run stood, and its optimizer files. The weights are the manifest's, as
in any rank tree. No framework is imported.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from converter.hf_folder import check_inside, read_json_object
from converter.manifest import Manifest, TensorRecord, is_plain_relative, read_manifest, write_atomically
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse
from train.config import TrainConfig

TRAINING = "training.json"
LATEST = "latest"
REPLACED = ".replaced"
"""Added to the name of a checkpoint while another of the same step takes its place."""
CHECKPOINT_NAME = re.compile(r"step_[0-9]{8,}")
STATE_VERSION = 1
MAX_BYTES = 512 << 20
MAX_PROBLEMS = 20
_MEND = "choose another checkpoint"


@dataclass(frozen=True)
class StateFileRecord:
    """An optimizer file. `data` is its data-parallel index: every one has its own where the state is divided, otherwise they share index
    0's.
    """

    path: str
    stage: int
    data: int
    tensor: int
    size: int
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class Schedule:
    """What the learning rate of a step follows from."""

    kind: str
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    steps: int
    scale_by_sqrt_dp: bool

    @classmethod
    def of(cls, config: TrainConfig) -> Schedule:
        chosen = config.optimizer
        return cls(
            chosen.schedule,
            chosen.learning_rate,
            chosen.min_learning_rate,
            chosen.warmup_steps,
            config.train.steps,
            chosen.scale_by_sqrt_dp,
        )


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `step`: steps done. `sample_offset`: place in the endless list of sequences (train/loader.py), whatever dp is.
    `seed`, `shuffle` and `data_digest` decide what stands in that list; `seed` is also dropout's. `schedule`: None outside a configured
    run.
    """

    step: int
    sample_offset: int
    seed: int
    shuffle: bool = True
    data_digest: str = ""
    schedule: Schedule | None = None


@dataclass(frozen=True)
class TrainingState:
    """The whole file. `run` is the checkpoint's identity, that of its manifest too. `updates` counts the optimizer's, overflows left
    out.
    """

    state_version: int
    run: str
    progress: Progress
    updates: int
    loss_scale: float
    loss_scale_good: int
    optimizer_sharding: bool
    dp: int
    format: str
    files: tuple[StateFileRecord, ...]


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that `latest` names. Raises Refused when there is none, or it is not whole."""
    tracker = folder / LATEST
    if not tracker.is_file():
        raise refuse("no checkpoint to resume from", str(folder), "start without --resume, or mend checkpoint.folder")
    with open(tracker, encoding="utf-8", errors="replace") as file:
        name = file.read(80).strip()
    if not CHECKPOINT_NAME.fullmatch(name):
        raise refuse("does not name a checkpoint", str(tracker), "write the name of a whole one, step_00000010 for example")
    if not (folder / name).is_dir():
        if (folder / (name + REPLACED)).is_dir():
            mend = f"a kill came while another was to take its place: rename {name}{REPLACED} to {name}"
            raise refuse(f"names {name}, which is not there", str(tracker), mend)
        raise refuse(f"names {name}, which is not there", str(tracker), "write the name of a whole one, step_00000010 for example")
    read_manifest(folder / name)
    return folder / name


def write_state(folder: Path, state: TrainingState) -> None:
    """Write `training.json` atomically."""
    write_atomically(folder / TRAINING, json.dumps(encode(state), separators=(",", ":")))


def read_state(folder: Path, manifest: Manifest) -> TrainingState:
    """Read and check `training.json`, and that the optimizer files are there in their sizes. `manifest`: the one beside it.

    Raises Refused, naming every file that is missing, foreign or not as recorded.
    """
    path = folder / TRAINING
    if not path.is_file():
        raise refuse(f"no {TRAINING}: weights without a training state", str(folder), "start from it as model.path, without --resume")
    data = read_json_object(path, MAX_BYTES, folder)
    if data.get("state_version") != STATE_VERSION:
        found = str(data.get("state_version"))[:40]
        raise refuse(f"state version {found}, this tool reads {STATE_VERSION}", str(path), "use the version that wrote it")
    try:
        state = decode(TrainingState, data, "state")
    except (RecordError, RecursionError) as error:
        raise refuse(str(error)[:300], str(path), _MEND) from error
    if state.run != manifest.run:
        raise refuse("of another checkpoint than the manifest beside it", str(path), _MEND)
    problems = [Problem(what, where, _MEND) for where, what in (*_impossible(state, manifest), *_mistakes(folder, state))]
    if problems:
        raise Refused(f"the checkpoint {folder.name} is not whole", problems[:MAX_PROBLEMS])
    return state


def _impossible(state: TrainingState, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What no run writes."""
    layout = manifest.layout.layout()
    if state.updates > state.progress.step:
        yield TRAINING, f"{state.updates} updates in {state.progress.step} steps cannot be"
    if not 0 < state.loss_scale < math.inf:
        yield TRAINING, f"the loss scale cannot be {state.loss_scale}"
    copies = layout.dp if state.optimizer_sharding else 1
    places = product(range(layout.pp), range(copies), range(layout.tp))
    if state.dp != layout.dp or sorted((file.stage, file.data, file.tensor) for file in state.files) != list(places):
        yield TRAINING, "its optimizer files are not those of the manifest's layout"


def _mistakes(folder: Path, state: TrainingState) -> Iterator[tuple[str, str]]:
    for name, count in Counter(file.path for file in state.files).items():
        if count > 1:
            yield name[:80], "is named twice"
    for file in state.files:
        if not is_plain_relative(file.path):
            yield file.path[:80], "is no path below the checkpoint"
            continue
        place = folder / file.path
        if not place.is_file():
            yield file.path, "is missing"
            continue
        check_inside(place, folder)
        if place.stat().st_size != file.size:
            yield file.path, f"has {place.stat().st_size} bytes, not {file.size}"


def differences(saved: Progress, wanted: Progress) -> tuple[list[Problem], list[str]]:
    """What keeps a run from being continued as `wanted`, and what merely changes."""
    problems = []
    for name, setting in (("seed", "train.seed"), ("shuffle", "data.shuffle"), ("data_digest", "data.path")):
        before, now = getattr(saved, name), getattr(wanted, name)
        if before != now:
            what = "is other data than the checkpoint's" if name == "data_digest" else f"is {now}, the checkpoint's run had {before}"
            problems.append(Problem(what, setting, "continue with the same, or start anew from the checkpoint as model.path"))
    notes = []
    if saved.schedule is not None and wanted.schedule is not None:
        before_values: dict[str, Any] = asdict(saved.schedule)
        for name, now in asdict(wanted.schedule).items():
            if before_values[name] != now:
                notes.append(f"the schedule's {name} was {before_values[name]} and is now {now}")
    return problems, notes
