"""Megatron-Energon: the task encoder whose hooks call the policy, and loaders that know what was trained on."""

from lightning_pack.energon.dataset import StreamOptions, has_split, open_pass, open_stream
from lightning_pack.energon.fingerprint import data_fingerprint
from lightning_pack.energon.loader import ExactLoader
from lightning_pack.energon.passes import PassLoader

__all__ = ["ExactLoader", "PassLoader", "StreamOptions", "data_fingerprint", "has_split", "open_pass", "open_stream"]
