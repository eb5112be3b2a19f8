"""Packs written ahead: rows that are decided once, written as an Energon dataset, and replayed as they are."""

from lightning_pack.offline.manifest import Manifest, ManifestError
from lightning_pack.offline.prepack import PackedRows, prepack
from lightning_pack.offline.verification import VerificationError, Verified, verify

__all__ = ["Manifest", "ManifestError", "PackedRows", "VerificationError", "Verified", "prepack", "verify"]
