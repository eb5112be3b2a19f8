"""pack_loader: the batches of any loader as packed rows, packed over several batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_pack.collated.fields import BatchFields
from lightning_pack.collated.loader import OnMismatch, PackLoader
from lightning_pack.collated.usable import refuse_split, require_policy
from lightning_pack.policy import PackingPolicy

#: Settings of the loader of a whole stream.
_OF_A_STREAM = ("buffer_size", "min_bins", "bins_multiple_of", "balance", "window")


def pack_loader(
    loader: Iterable[Any],
    policy: PackingPolicy,
    *,
    window: int = 8,
    fields: BatchFields | None = None,
    pad_id: int = 0,
    even_ranks: bool = True,
    for_predict: bool = False,
    sharded: bool = False,
    on_mismatch: OnMismatch = "error",
) -> PackLoader:
    """The batches of a loader as packed rows, each one pack, packed over a window of batches.

    A row holds sources of several batches, and sources that found no good row wait over the next choices as the policy says
    (``carry_over``, ``age_limit``; ages are counted in batches). Each iteration is one pass of the loader in which every source
    comes once, or is reported with its reason in a row's ``left_out``; a pass that ``limit_train_batches`` ends goes on in the
    next epoch. There is no length, since nobody knows it before. Rows are pinned where the loader has ``pin_memory=True``.

    **Predict.** With ``for_predict`` batches need no labels, sources without a target are packed like others, and no rank
    leaves a source out to be even: blank rows, without a source, make up for what it lacks. Rows come in the order in which
    they are packed, and so do the results: by the keys of their sources and not in the order of the data.
    :func:`~lightning_pack.collated.in_reading_order` puts what ``trainer.predict`` returns in order. A ``DistributedSampler``
    repeats sources to be even; ``UnrepeatedDistributedSampler`` of ``lightning.pytorch.overrides.distributed`` does not.

    **Several ranks.** With ``even_ranks`` each rank gets as many rows in a pass as every other, which training needs; the
    sources of rows that a rank has more are reported as ``uneven_ranks``. Lightning puts a ``DistributedSampler`` only into
    DataLoaders that it sees, so the loader has to bring its own; one that does not is refused. ``set_epoch`` of its samplers is
    called before each pass.

    **Resume.** Under a Trainer with :class:`~lightning_pack.callbacks.PackedAttention` a run goes on exactly where its last
    completed optimizer step was, if the loader has ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``):
    the checkpoint holds the loader's state before the oldest batch of which a source waits, and which sources wait. Those
    batches are read again. Where the loader cannot tell its state, a warning says so, and a resume is refused.
    A loader that a fit trains on cannot serve its validation too, which would move the position; when the fit is over, each
    iteration is a whole pass again.

    Args:
        loader: one loader: any iterable of padded or flattened batches, or of lists of samples that are not padded
            (``collate_fn=list``), see :func:`~lightning_pack.collated.sources.sources_of`.
        policy: decides what shares a row. ``algorithm="auto"`` is settled by the sources of the first window.
            ``buffer_size`` and ``balance`` are those of streams and are refused.
        window: batches to choose from.
        fields: what the entries of the batches are.
        pad_id: token id in gaps.
        even_ranks: whether all ranks get equally many rows; False gives each rank all of its own, for evaluation.
        for_predict: the rows are for ``trainer.predict``. ``PackedAttention`` refuses them in training, and in validation and
            test unless it has ``evaluate_unlabelled=True``.
        sharded: the loader gives each rank a part of its own although no ``DistributedSampler`` shows it.
        on_mismatch: what happens to a resume that cannot be exact: ``"error"`` refuses it, ``"restart"`` starts the data over
            with a warning and keeps weights and optimizer.

    Raises:
        ValueError: for settings that do not fit or are not used.

    Example:
        >>> import torch
        >>> samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (5, 3, 6, 2)]
        >>> rows = list(pack_loader([samples[:2], samples[2:]], PackingPolicy(8, algorithm="best_fit_decreasing")))
        >>> sorted(sorted(row.cu_seqlens.diff().tolist()) for row in rows)
        [[2, 6], [3, 5]]
    """
    require_policy(policy)
    _refuse_several(loader)
    unused = {f.name: f.default for f in fields_of(policy) if f.name in _OF_A_STREAM}
    if changed := [f"{name}={getattr(policy, name)!r}" for name, default in unused.items() if getattr(policy, name) != default]:
        raise ValueError(
            f"pack_loader chooses from a window of batches and does not use {', '.join(changed)}: leave it out, and say "
            "window=... for the number of batches"
        )
    refuse_split(policy)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: a whole number of at least 1 is needed")
    if on_mismatch not in ("error", "restart"):
        raise ValueError(f"on_mismatch={on_mismatch!r} is not one of 'error', 'restart'")
    return PackLoader(
        loader,
        replace(policy, buffer_size=window),
        fields=fields or BatchFields(),
        pad_id=pad_id,
        even_ranks=even_ranks,
        for_predict=for_predict,
        sharded=sharded,
        on_mismatch=on_mismatch,
    )


def _refuse_several(loader: Any) -> None:
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ValueError(
            f"pack_loader packs the batches of a loader, and got {loader!r:.80}: give it a DataLoader, or another iterable of "
            "batches"
        )
    # Lightning's CombinedLoader, of either of its names.
    several = getattr(loader, "flattened", None)
    if isinstance(loader, Mapping):
        several = list(loader.values())
    elif isinstance(loader, list | tuple) and any(isinstance(each, DataLoader | PackLoader) for each in loader):
        several = list(loader)
    if several is not None:
        raise ValueError(
            f"pack_loader takes one loader, and got a {type(loader).__name__} of {len(several)}: to pack their sources "
            "together, join the datasets in one DataLoader (torch.utils.data.ConcatDataset); to evaluate on each of them, give "
            "the Trainer a list, [pack_loader(a, policy), pack_loader(b, policy)]"
        )
