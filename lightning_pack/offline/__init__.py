"""Packs written ahead: rows that are decided once, written as an Energon dataset, and replayed as they are."""

from lightning_pack.offline.conversion import convert
from lightning_pack.offline.given_row import GivenRowError
from lightning_pack.offline.manifest import Manifest, ManifestError
from lightning_pack.offline.prepacking import PackedRows, prepack
from lightning_pack.offline.verification import VerificationError, Verified, verify

__all__ = [
    "GivenRowError",
    "Manifest",
    "ManifestError",
    "PackedRows",
    "VerificationError",
    "Verified",
    "convert",
    "prepack",
    "verify",
]
