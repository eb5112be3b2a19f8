"""Megatron-Energon: the task encoder whose hooks call the policy, and loaders that know what was trained on."""

from lightning_pack.energon.dataset import StreamOptions, has_split, refuse_endless
from lightning_pack.energon.fingerprint import data_fingerprint
from lightning_pack.energon.loader import ExactLoader, redistribute
from lightning_pack.energon.passes import PassLoader
from lightning_pack.energon.reader import Workers
from lightning_pack.energon.sampling import SampledSources, check_group_field, sample_sources

__all__ = [
    "ExactLoader",
    "PassLoader",
    "SampledSources",
    "StreamOptions",
    "Workers",
    "check_group_field",
    "data_fingerprint",
    "has_split",
    "redistribute",
    "refuse_endless",
    "sample_sources",
]
