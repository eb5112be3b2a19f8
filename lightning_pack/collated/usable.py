"""Which packing rules there are for a micro-batch, which has no stream behind it."""

from __future__ import annotations

from dataclasses import fields

from lightning_pack.binning import packer_options
from lightning_pack.policy import PackingPolicy

#: Settings of a stream of sources, without a meaning for the sources of a micro-batch.
OF_A_STREAM = ("buffer_size", "carry_over", "age_limit", "min_bins", "bins_multiple_of", "balance", "window")


def usable_policy(policy: PackingPolicy) -> PackingPolicy:
    """The policy itself.

    Raises:
        ValueError: naming each setting that is not its default and that packing the sources of one batch does not use.
    """
    require_policy(policy)
    default = {f.name: f.default for f in fields(policy)}
    unused = [name for name in OF_A_STREAM if getattr(policy, name) != default[name]]
    if policy.seed != default["seed"] and "seed" not in packer_options(policy.packer):
        unused.append("seed")
    if unused:
        raise ValueError(
            f"PackedAttention packs the sources of one batch at a time, which does not use "
            f"{', '.join(f'{name}={getattr(policy, name)!r}' for name in unused)}: leave it out, or pack over several batches "
            "with pack_loader(loader, policy)"
        )
    refuse_split(policy)
    return policy


def require_policy(policy: object) -> None:
    """Refuse what is no policy, such as a bare capacity.

    Raises:
        ValueError: for that.
    """
    if not isinstance(policy, PackingPolicy):
        raise ValueError(f"policy={policy!r} is no PackingPolicy: pass PackingPolicy(capacity)")


def refuse_split(policy: PackingPolicy) -> None:
    """Refuse ``overlength="split"``.

    Raises:
        ValueError: for that.
    """
    if policy.overlength == "split":
        raise ValueError(
            "overlength='split' cuts plain texts, and batches of a collator do not tell which of their sources are plain: "
            "choose 'drop', 'truncate' or 'error', or cut the texts before they are batched"
        )
