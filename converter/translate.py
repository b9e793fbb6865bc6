"""translate: a checkpoint from one dialect, cut or disk layout to another, without a Hugging Face folder in between.

The plan goes through Hugging Face's tensors, which nobody writes: how a checkpoint puts each together and how hf2ms would take it apart
are two steps of copies, and converter/joined_copies.py makes them one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from converter.foreign2hf import ForeignRestoration, ForeignSource, check_replicas, plan_foreign
from converter.hf2ms import Conversion, Origin, RankTreeOptions, conversion_of
from converter.hf_folder import SAFETENSORS, TORCH, HFFolder, SideFile, WeightFile
from converter.manifest import MANIFEST, SIDE_FOLDER, SideFileRecord, SourceRecord, TensorRecord, WeightFileRecord
from converter.ms2hf import CONFIG, HFOptions, check_slices
from converter.plan import Plan, TargetTensor
from converter.plan_ms2hf import assembled
from converter.rank_tree import RankTree, read_rank_tree
from converter.side_files import check_side_files
from converter.source_model import SourceModel
from converter.tensors import StoredTensor

NOWHERE = Path("the tensor is not stored")


@dataclass(frozen=True)
class TranslationOptions:
    """What a user may choose; None for tp, pp, dp and the layers of each stage: as the source has them."""

    target: str
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    vocab_multiple: int | None = None
    disk: str = "rank"
    max_file_bytes: int | None = None
    file_format: str = "safetensors"
    ranks: tuple[int, ...] | None = None
    durable: bool = False
    workers: int = 2
    overwrite: bool = False

    def conversion(self, tp: int, pp: int, dp: int, layers: tuple[int, ...] | None) -> RankTreeOptions:
        """The options of hf2ms, with those of the source where nothing was chosen."""
        same_stages = self.pp in (None, pp)
        return RankTreeOptions(
            tp=self.tp or tp, pp=self.pp or pp, dp=self.dp or dp,
            layers_per_stage=self.layers_per_stage or (layers if same_stages else None), vocab_multiple=self.vocab_multiple,
            target=self.target, disk=self.disk, max_file_bytes=self.max_file_bytes, file_format=self.file_format, ranks=self.ranks,
            durable=self.durable, workers=self.workers, overwrite=self.overwrite,
        )  # fmt: skip


def plan_translation(folder: Path, options: TranslationOptions) -> Conversion:
    """Plan the translation of an output of ms-convert. Raises Refused."""
    tree = read_rank_tree(folder)
    made = assembled(tree)
    layout = tree.cut_for
    origin = Origin(
        made, lambda side_files: replace(tree.manifest.source, side_files=side_files), tree.manifest.dtype,
        xxhash.xxh3_128_hexdigest((folder / MANIFEST).read_bytes()), lambda plan: _check_tree(tree, plan, options.workers),
    )  # fmt: skip
    chosen = options.conversion(layout.tp, layout.pp, layout.dp, layout.layers_per_stage)
    return conversion_of(_model_of_tree(tree, made), chosen, origin)


def _check_tree(tree: RankTree, plan: Plan, workers: int) -> None:
    check_side_files(tree.manifest.source.side_files, tree.path / SIDE_FOLDER)
    check_slices(tree, plan, workers)


def _model_of_tree(tree: RankTree, made: Mapping[str, TargetTensor]) -> SourceModel:
    """The tree as the Hugging Face model that it came from."""
    source = tree.manifest.source
    side = tree.path / SIDE_FOLDER
    folder = HFFolder(
        side, source.config, SAFETENSORS if source.form == "safetensors" else TORCH, _files_of(source), source.index,
        tuple(SideFile(record.name, side / record.name, record.size) for record in source.side_files if record.name != source.index), (),
    )  # fmt: skip
    dropped = {tree.names[name]: tree.expansion.drops[tree.names[name]] for name in source.dropped}
    duplicates = {tree.names[name]: tree.names[of] for name, of in source.duplicates.items()}
    config = replace(tree.manifest.model, padded_vocab=tree.manifest.model.vocab)
    return SourceModel(folder, tree.table, config, tree.canonical, _unstored(made), tree.names, dropped, duplicates, ())


def _unstored(made: Mapping[str, TargetTensor]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(name, NOWHERE, tensor.dtype, tensor.shape, ()) for name, tensor in made.items()}


def _files_of(source: SourceRecord) -> tuple[WeightFile, ...]:
    return tuple(
        WeightFile(
            file.name, NOWHERE, file.size, 0, tuple(StoredTensor(item.name, NOWHERE, item.dtype, item.shape, ()) for item in file.tensors),
            file.metadata,
        )
        for file in source.files
    )  # fmt: skip


def plan_foreign_translation(source: ForeignSource, options: TranslationOptions) -> Conversion:
    """Plan the translation of a checkpoint without a manifest; tp, pp and dp are 1 where nothing was chosen. Raises Refused."""
    restoration = plan_foreign(source, HFOptions(workers=options.workers), one_file=True)
    made = {tensor.name: tensor for file in restoration.plan.files for tensor in file.tensors}
    model = _model_of_foreign(restoration, made)
    origin = Origin(
        made, lambda side_files: _record_of_foreign(model, side_files), "keep", restoration.run.identity,
        lambda plan: check_replicas(restoration.model.checkpoint.replicas, options.workers),
    )  # fmt: skip
    return conversion_of(model, options.conversion(1, 1, 1, None), origin)


def _model_of_foreign(restoration: ForeignRestoration, made: Mapping[str, TargetTensor]) -> SourceModel:
    """The checkpoint as the Hugging Face folder that ms2hf would write, of one file."""
    model, file = restoration.model, restoration.plan.files[0]
    stored = _unstored(made)
    weights = WeightFile(file.path, NOWHERE, restoration.plan.nbytes, 0, tuple(stored.values()), dict(file.metadata))
    config = SideFile(CONFIG, restoration.config, restoration.config.stat().st_size)
    folder = HFFolder(
        restoration.config.parent, model.hf_config, SAFETENSORS, (weights,), None, (*restoration.side_files, config), ()
    )  # fmt: skip
    return SourceModel(
        folder, model.table, model.config, model.canonical, stored, {name: name for name in stored}, {}, {}, tuple(model.notes)
    )  # fmt: skip


def _record_of_foreign(model: SourceModel, side_files: tuple[SideFileRecord, ...]) -> SourceRecord:
    file = model.folder.files[0]
    tensors = tuple(TensorRecord(item.name, item.dtype, item.shape) for item in file.tensors)
    weights = WeightFileRecord(file.name, file.size, file.metadata, tensors)
    return SourceRecord(model.folder.path.resolve().name, "safetensors", None, (weights,), side_files, {}, {}, model.folder.config)
