"""The runs that ``bench owners`` compares: one module, one model, the same sources, and five ways to make batches of them."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_pack.bench.padding import grouped_by_length, padded_batch
from lightning_pack.bench.sample import PlainSample
from lightning_pack.callbacks import PackedAttention, PackingMonitor
from lightning_pack.collated import pack_loader, packed_row
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.offline import Manifest, prepack
from lightning_pack.policy import PackingPolicy
from lightning_pack.policy_checks import refuse_media
from lightning_pack.source import EncodedSource

#: In the order in which they run.
WAYS = ("while-reading", "ahead", "over-batches", "each-batch", "grouped", "padded")
#: The one that all others are compared with.
PADDED = WAYS[-1]
#: Batches that :func:`~lightning_pack.collated.pack_loader` chooses from.
WINDOW = 8


class _Module(LightningModule):
    """Calls its model as any project does."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss over the targets of the batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> AdamW:
        """With a rate that changes little."""
        return AdamW(self.parameters(), lr=1e-5)


class Meter(Callback):
    """What the batches of a run held, and when each began. Behind PackedAttention, which packs them."""

    def __init__(self) -> None:
        #: When each batch began, and when the last ended, in seconds.
        self.times: list[float] = []
        #: Real tokens of each batch.
        self.real: list[int] = []
        #: Tokens of each batch, pads included.
        self.slots: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        self.times.append(time.perf_counter())
        row = packed_row(batch)
        self.real.append(int(batch["attention_mask"].sum() if row is None else row.cu_seqlens[-1]))
        self.slots.append(batch["input_ids"].numel() if row is None else row.input_ids.numel())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last batch has ended."""
        self.times.append(time.perf_counter())

    @property
    def rate(self) -> float:
        """Real tokens per second, without the first step, which pays for the start."""
        return sum(self.real[1:]) / (self.times[-1] - self.times[1])


class _Tokens:
    """``{"key", "ids", "labels"}`` -> that source."""

    pad_id = 0

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        return EncodedSource.of(record["key"], torch.tensor(record["ids"]), torch.tensor(record["labels"]))

    def fingerprint(self) -> dict[str, Any]:
        return {"encoder": "tokens"}


class OwnerRun(NamedTuple):
    """One way to make batches. Turns differ in the order of the sources."""

    #: Short, one of :data:`WAYS`.
    way: str
    #: In words.
    name: str
    #: Turn -> what held the batches, and when.
    run: Callable[[int], Meter]


class OwnerRuns:
    """The runs of one configuration.

    Args:
        model: that all of them train on.
        data: the sources, and the policy; its first sources are trained on, in whatever rows each way makes of them.
        rows: how many rows they fill.
        folder: for the rows that are written ahead.

    Raises:
        ValueError: for data whose sources could not be the same everywhere.
    """

    def __init__(self, model: PreTrainedModel, data: EnergonPackDataModule, *, rows: int, folder: Path) -> None:
        if Manifest.read(data.path) is not None:
            raise ValueError(f"{data.path!r} holds rows that are decided: give the data that they were made from")
        if data.packs_per_batch != 1:
            raise ValueError(f"packs_per_batch={data.packs_per_batch}: rows written ahead come one by one; set it to 1")
        if data.group_by is not None:
            raise ValueError(f"group_by={data.group_by!r}: a batch does not tell of groups; leave it out")
        self._module, self._data = _Module(model), data
        #: Each further one would end the short pass with a row of its own that is not full.
        self.workers = min(data.num_workers, 1)
        model.config.use_cache = False
        data.setup("validate")
        refuse_media(data.encoder, "rows that are written ahead")
        sample = PlainSample.read(data.options, tokens=rows * data.packing.capacity)
        self.sources = sample.sources
        self.tokens = sum(map(len, self.sources))
        #: Sources of a padded batch: as many as a row holds on average.
        self.batch_size = -(-len(self.sources) // rows)
        policy = data.packing
        self._policy = PackingPolicy(
            policy.capacity,
            algorithm="minimum_bin_slack",
            multiple=policy.multiple,
            width=policy.width,
            max_sources=policy.max_sources,
            fixed_boundaries=policy.fixed_boundaries,
        )
        folder.mkdir()
        self._records = _written(folder / "records.jsonl", sample.records)
        self._written = self._write(folder)

    def _write(self, folder: Path) -> Path:
        file = _written(
            folder / "sources.jsonl",
            (
                {"key": source.key, "ids": source.input_ids.tolist(), "labels": source.labels.tolist()}
                for source in self.sources
            ),
        )
        settings = ("capacity", "algorithm", "multiple", "width", "max_sources", "fixed_boundaries")
        options: dict[str, Any] = {name: getattr(self._policy, name) for name in settings}
        return prepack(file, folder / "rows", encoder=_Tokens(), workers=0, shards=2, **options).path

    def __iter__(self) -> Iterator[OwnerRun]:
        """The owners, then padded batches."""
        yield OwnerRun("while-reading", "packed while reading", self._online)
        yield OwnerRun("ahead", "packed ahead, replayed", self._offline)
        yield OwnerRun("over-batches", f"packed over {WINDOW} batches", self._over_batches)
        yield OwnerRun("each-batch", "packed in each batch", self._in_each_batch)
        yield OwnerRun("grouped", "padded, grouped by length", partial(self._padded, grouped=True))
        yield OwnerRun(PADDED, "padded", partial(self._padded, grouped=False))

    def _online(self, turn: int) -> Meter:
        data = self._data
        rows = EnergonPackDataModule(
            self._records,
            encoder=data.encoder,
            packing=data.packing,
            parallel=data.parallel,
            num_workers=self.workers,
            shuffle_buffer_size=data.shuffle_buffer_size,
            max_samples_per_sequence=data.max_samples_per_sequence,
            on_damaged=data.on_damaged,
            seed=turn,
            epochs=1,
        )
        return self._fit(PackedAttention(), datamodule=rows)

    def _offline(self, turn: int) -> Meter:
        rows = EnergonPackDataModule(self._written, num_workers=self.workers, seed=turn, epochs=1)
        return self._fit(PackedAttention(), datamodule=rows)

    def _over_batches(self, turn: int) -> Meter:
        return self._fit(PackedAttention(), train_dataloaders=pack_loader(self._batches(turn), self._policy, window=WINDOW))

    def _in_each_batch(self, turn: int) -> Meter:
        return self._fit(PackedAttention(policy=self._policy), train_dataloaders=self._batches(turn))

    def _padded(self, turn: int, *, grouped: bool) -> Meter:
        return self._fit(train_dataloaders=self._batches(turn, grouped=grouped))

    def _batches(self, turn: int, *, grouped: bool = False) -> DataLoader[Any]:
        """The sources as padded batches of equally many, shuffled, as a project without packing has them."""
        generator = torch.Generator().manual_seed(turn)
        order = torch.randperm(len(self.sources), generator=generator).tolist()
        size = self.batch_size
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        if grouped:
            batches = grouped_by_length([len(source) for source in self.sources], order, size=size, generator=generator)
        collate = partial(padded_batch, pad_id=self._data.encoder.pad_id)
        return DataLoader(self.sources, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]

    def _fit(self, *callbacks: Callback, **given: Any) -> Meter:
        meter = Meter()
        monitor = [PackingMonitor(summary=False)] if callbacks else []
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            callbacks=[*callbacks, *monitor, meter],
            logger=False,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self._module, **given)
        return meter


def _written(file: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """A file of records that Energon reads."""
    with file.open("x") as out:
        for record in records:
            try:
                out.write(json.dumps(record) + "\n")
            except TypeError as e:
                raise ValueError(f"a record of the data is no JSON ({e}): give data of texts or chats") from e
    with contextlib.redirect_stdout(io.StringIO()):
        CrudeJsonlDatasetFactory.prepare_dataset(str(file))
    return file


def checked(run: OwnerRun, meter: Meter, *, tokens: int) -> Meter:
    """The meter itself.

    Raises:
        RuntimeError: if the run did not train on so many real tokens, so that its figures say nothing.
    """
    if sum(meter.real) != tokens:
        raise RuntimeError(f"{run.name}: {sum(meter.real):,} real tokens were trained on, and there are {tokens:,}")
    if len(meter.real) < 2:
        raise RuntimeError(f"{run.name}: {len(meter.real)} steps, of which the first is not measured; ask for more rows")
    return meter


def turns_of(runs: OwnerRuns, *, turns: int, seconds: float = float("inf")) -> dict[str, list[Meter]]:
    """What the turns of each run gave, by its way; runs take turns, so that a busy machine hurts all alike.

    Args:
        runs: to be measured.
        turns: at most; there is one at least.
        seconds: after which all should be done: no turn begins that would take longer, if it took as long as the longest.
    """
    meters: dict[str, list[Meter]] = {run.way: [] for run in runs}
    started, longest = time.perf_counter(), 0.0
    for turn in range(turns):
        begun = time.perf_counter()
        if turn and begun - started + longest > seconds:
            break
        for run in runs:
            meters[run.way].append(checked(run, run.run(turn), tokens=runs.tokens))
        longest = max(longest, time.perf_counter() - begun)
    return meters
