"""Whether a configuration fits itself, the model, the data and the number of ranks: every problem at once, before MindSpore is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from converter.layout import MAX_LISTED_TP, blockers, padded_vocabulary, split_layers
from mappings.errors import Problem, Refused
from model.config import ModelConfig
from train.config import TrainConfig
from train.data_index import DataIndex
from train.training_state import LATEST


def check(config: TrainConfig, model: ModelConfig, ranks: int | None) -> list[Problem]:
    """What does not fit. `ranks` is the number of processes that were started; None before they are."""
    found = chain(
        _ranks(config, ranks), _tensor_parallel(config, model), _pipeline(config, model), _vocabulary(config, model), _batch(config),
        _schedule(config), _model(config, model), _folders(config), _precision(config), _hosts(config), _check_start(config),
        _semi_auto(config, model),
    )  # fmt: skip
    return list(found)


def check_data(config: TrainConfig, model: ModelConfig, index: DataIndex, setting: str = "data.path") -> list[Problem]:
    """What does not fit the prepared data, which the dotted `setting` names."""
    return list(_data(config, model, index, setting))


def _ranks(config: TrainConfig, ranks: int | None) -> Iterator[Problem]:
    parallel = config.parallel
    if ranks is not None and ranks != config.ranks:
        mend = f"start it with `ms-train launch`, which starts {config.ranks}" if ranks == 1 else "let the product be the number of ranks"
        yield Problem(
            f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} = {config.ranks} ranks, but {ranks} {'runs' if ranks == 1 else 'run'}",
            "parallel",
            mend,
        )


def _tensor_parallel(config: TrainConfig, model: ModelConfig) -> Iterator[Problem]:
    axes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn}
    blocked = blockers(axes, config.parallel.tp)
    if blocked:
        working = [tp for tp in range(1, min(model.heads, MAX_LISTED_TP) + 1) if not blockers(axes, tp)]
        mend = f"tp values that work for this model: {', '.join(map(str, working))}"
        yield Problem(f"{' and '.join(blocked)} cannot be divided among {config.parallel.tp} tensor-parallel ranks", "parallel.tp", mend)


def _pipeline(config: TrainConfig, model: ModelConfig) -> Iterator[Problem]:
    parallel = config.parallel
    try:
        split_layers(model.layers, parallel.pp, parallel.layers_per_stage)
    except Refused as refused:
        for problem in refused.problems:
            yield Problem(problem.what, "parallel.layers_per_stage" if parallel.layers_per_stage else "parallel.pp", problem.mend)
    if parallel.micro_batches < parallel.pp:
        mend = f"a pipeline of {parallel.pp} stages is full with {parallel.pp} micro-batches or more; 4 x pp wastes little"
        yield Problem(f"is {parallel.micro_batches}, less than pp {parallel.pp}", "parallel.micro_batches", mend)


def _vocabulary(config: TrainConfig, model: ModelConfig) -> Iterator[Problem]:
    try:
        padded_vocabulary(model.vocab, config.parallel.tp, config.parallel.vocab_multiple)
    except Refused as refused:
        for problem in refused.problems:
            yield Problem(problem.what, "parallel.vocab_multiple", problem.mend)


def _batch(config: TrainConfig) -> Iterator[Problem]:
    parallel, batch = config.parallel, config.train.global_batch
    unit = parallel.dp * parallel.micro_batches
    if batch % unit:
        mend = f"use a multiple of {unit}: {max(batch // unit, 1) * unit} or {(batch // unit + 1) * unit}"
        yield Problem(
            f"{batch} sequences cannot be divided among dp {parallel.dp} x {parallel.micro_batches} micro-batches",
            "train.global_batch",
            mend,
        )


def _schedule(config: TrainConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.warmup_steps >= config.train.steps:
        mend = f"use less than train.steps {config.train.steps}"
        yield Problem(f"is {optimizer.warmup_steps}: the learning rate would never reach its peak", "optimizer.warmup_steps", mend)
    if optimizer.min_learning_rate > optimizer.learning_rate:
        mend = f"use at most optimizer.learning_rate {optimizer.learning_rate}"
        yield Problem(f"is {optimizer.min_learning_rate}, above the peak", "optimizer.min_learning_rate", mend)


def untrainable(model: ModelConfig, where: str) -> Iterator[Problem]:
    """Why the bundled trainer does not train this kind of model. `where` names it."""
    if model.kind != "decoder" or not model.head:
        what = "an encoder" if model.kind != "decoder" else "a decoder without a head over the vocabulary"
        yield Problem(f"is {what}; ms-train predicts the next token", where, "give a causal language model")
    if model.experts:
        yield Problem("has mixture-of-experts layers, which are converted but not computed", where)


def _model(config: TrainConfig, model: ModelConfig) -> Iterator[Problem]:
    yield from untrainable(model, f"model.path: {config.model.path}")
    length = config.data.seq_length
    if length is not None and length > model.max_positions:
        yield Problem(
            f"is {length}, the model has {model.max_positions} positions", "data.seq_length", f"use at most {model.max_positions}"
        )
    if config.train.recompute_every > model.layers:
        mend = f"use at most {model.layers}, or 0"
        yield Problem(f"is {config.train.recompute_every}, the model has {model.layers} layers", "train.recompute_every", mend)


def _folders(config: TrainConfig) -> Iterator[Problem]:
    source, output = Path(config.model.path).resolve(), Path(config.checkpoint.folder).resolve()
    if output == source or output.is_relative_to(source):
        yield Problem(
            "lies inside model.path, which stays as it is", f"checkpoint.folder: {config.checkpoint.folder}", "give another folder"
        )
    elif not config.checkpoint.resume and (output / LATEST).exists():
        yield Problem(
            "holds the checkpoints of a run, which a new run would remove",
            f"checkpoint.folder: {config.checkpoint.folder}",
            "go on from them with --resume, or give another folder",
        )
    for name, given in (("checkpoint.folder", config.checkpoint.folder), ("watch.folder", config.watch.folder)):
        place = Path(given).absolute()
        place = next(folder for folder in (place, *place.parents) if folder.exists() or folder.is_symlink())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            yield Problem(f"{place} is no folder that can be written", f"{name}: {given}", "give another folder")


def _precision(config: TrainConfig) -> Iterator[Problem]:
    if config.compute == "bfloat16" and config.launch.device == "cpu":
        yield Problem("is bfloat16, which MindSpore does not compute on a CPU", "precision.compute", "leave it out, or say float32")
    if config.compute == "float16" and config.precision.kind == "bfloat16":
        yield Problem("is float16, whose range bfloat16 weights exceed", "precision.compute", "use bfloat16 or float32")


def _semi_auto(config: TrainConfig, model: ModelConfig) -> Iterator[Problem]:
    if config.train.engine != "semi_auto":
        return
    several = config.ranks > 1
    if several and config.launch.device == "cpu":
        what = f'is "semi_auto" on {config.ranks} ranks, but MindSpore\'s parallel compiler has no backend for a CPU'
        yield Problem(what, "train.engine", 'use "spmd", or launch.device = "ascend"')
    if config.train.mode == "pynative":
        yield Problem('is "pynative", but "semi_auto" compiles graphs', "train.mode", 'use "graph", or train.engine = "spmd"')
    if "float16" in (config.precision.kind, config.compute):
        what = 'is float16, for whose loss scale "semi_auto" has no place'
        yield Problem(what, "precision.kind" if config.precision.kind == "float16" else "precision.compute", "use bfloat16 or float32")
    asked = {"validate_every": config.watch.validate_every, "check_start": config.watch.check_start}
    for name in [name for name, value in asked.items() if several and value]:
        mend = 'leave it out; a checkpoint can be judged with train.engine = "spmd"'
        yield Problem('is set, but under "semi_auto" several ranks compile the training step only', f"watch.{name}", mend)
    if several and config.parallel.tp > 1 and model.kv_heads % config.parallel.tp:
        what = f'{model.kv_heads} KV heads cannot be divided among {config.parallel.tp} ranks, and "semi_auto" has no replicated heads'
        yield Problem(what, "parallel.tp", f'use a divisor of {model.kv_heads}, or train.engine = "spmd"')


def _hosts(config: TrainConfig) -> Iterator[Problem]:
    launch = config.launch
    if config.ranks % launch.nnodes:
        yield Problem(
            f"{config.ranks} ranks cannot be divided among {launch.nnodes} hosts", "launch.nnodes", "every host has the same number"
        )
    if launch.nnodes > 1 and launch.node_rank is None:
        yield Problem("is missing", "launch.node_rank", "number each host from 0: without it a rank may get another rank's slices")
    if launch.node_rank is not None and launch.node_rank >= launch.nnodes:
        yield Problem(f"is {launch.node_rank}, there are {launch.nnodes} host(s)", "launch.node_rank", "hosts are numbered from 0")
    if launch.nnodes > 1 and (launch.master_addr == "localhost" or launch.master_addr.startswith("127.")):
        yield Problem(
            f"is {launch.master_addr}, which is another host on each host", "launch.master_addr", "give host 0's address in the network"
        )
    if launch.hccl_socket_family is not None and launch.hccl_socket_ifname is None:
        yield Problem("has no effect without hccl_socket_ifname", "launch.hccl_socket_family", "give both or none")


def _check_start(config: TrainConfig) -> Iterator[Problem]:
    if config.watch.check_start is None:
        return
    where = f"watch.check_start: {config.watch.check_start}"
    if not (Path(config.watch.check_start) / "config.json").is_file():
        yield Problem("there is no config.json", where, "give the Hugging Face folder that the weights came from")
    lacking = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if lacking:
        yield Problem(f"{' and '.join(lacking)} cannot be imported", where, "pip install 'ms-convert[hf]'")


def _data(config: TrainConfig, model: ModelConfig, index: DataIndex, setting: str) -> Iterator[Problem]:
    path = config.data.path if setting == "data.path" else config.data.validation_path
    where = f"{setting}: {path}"
    wanted = config.data.seq_length
    if wanted is not None and wanted != index.seq_length:
        mend = f"leave data.seq_length out, or prepare the data with --seq-length {wanted}"
        yield Problem(f"was prepared for sequences of {index.seq_length} tokens, data.seq_length is {wanted}", where, mend)
    if wanted is None and index.seq_length > model.max_positions:
        mend = f"prepare it with --seq-length {model.max_positions} or less"
        yield Problem(f"has sequences of {index.seq_length} tokens, the model has {model.max_positions} positions", where, mend)
    mend = "prepare it with the model's own tokenizer"
    if index.largest_id >= model.vocab:
        yield Problem(f"holds the token id {index.largest_id}, the model's vocabulary ends at {model.vocab - 1}", where, mend)
    elif index.vocabulary > model.vocab:
        yield Problem(f"was prepared with a vocabulary of {index.vocabulary}, the model's has {model.vocab}", where, mend)
    if index.sequences < config.train.global_batch:
        mend = "use a smaller train.global_batch, shorter sequences or more text"
        yield Problem(f"has {index.sequences} sequences, fewer than one global batch of {config.train.global_batch}", where, mend)
