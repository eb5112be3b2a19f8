"""What turns the records of a datamodule into sources: the encoder that it was given, or that its settings ask for."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightning_pack.encoders import Encoder, RecordEncoder, VisionChatEncoder, load_tokenizer
from lightning_pack.energon.outage import StorageRetry
from lightning_pack.energon.storage import local_folder, set_retry
from lightning_pack.location import require_own_tokenizer
from lightning_pack.offline.agreement import replayed
from lightning_pack.offline.manifest import Manifest
from lightning_pack.offline.replay import ReplayPolicy, RowEncoder
from lightning_pack.offline.row_media import row_image_processor, row_media
from lightning_pack.policy import PackingPolicy


class EncoderChoice:
    """Tokenizer and encoder of some data, loaded on first use.

    Args:
        path: of the data, whose folder ``tokenizer`` is taken where none is given.
        tokenizer: folder of a tokenizer, or a tokenizer.
        vision: family of a vision-language model; the tokenizer's folder then holds an image processor too.
        encoder: one of one's own, which brings its tokenizer.
        group_by: field of the records that keeps sources apart; for the encoders of this package.
        storage_retry: how long an object store may be away.

    Raises:
        ValueError: for settings that do not go together.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None,
        vision: str | None,
        encoder: Encoder | None,
        group_by: str | None,
        storage_retry: StorageRetry,
    ) -> None:
        if encoder is not None and tokenizer is not None:
            raise ValueError("an encoder brings its own tokenizer: give one of encoder and tokenizer, not both")
        if vision is not None and (encoder is not None or not isinstance(tokenizer, str | Path | None)):
            raise ValueError(
                f"vision={vision!r} makes an encoder from the folder of a tokenizer and an image processor: give that folder "
                "as tokenizer, or an encoder of your own and no vision"
            )
        if encoder is not None and group_by is not None:
            raise ValueError(f"group_by={group_by!r} is for the default encoder: let yours set EncodedSource.group")
        self._path = path
        self._tokenizer_from = f"{path.rstrip('/')}/tokenizer" if tokenizer is None else tokenizer
        self._given_tokenizer = tokenizer
        self._encoder = self._given_encoder = encoder
        self._vision = vision
        self._group_by = group_by
        self._storage_retry = storage_retry

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ValueError: if there is none at the given folder.
        """
        if self._encoder is not None:
            return self._encoder.tokenizer  # type: ignore[attr-defined]
        if not isinstance(self._tokenizer_from, PreTrainedTokenizerBase):
            if self._given_tokenizer is None:
                require_own_tokenizer(self._path)
            set_retry(self._storage_retry)
            self._tokenizer_from = load_tokenizer(local_folder(self._tokenizer_from))
        return self._tokenizer_from

    @property
    def encoder(self) -> Encoder:
        """Record -> source."""
        if self._encoder is None and self._vision is not None:
            # A tokenizer that is loaded brings no image processor and was refused.
            assert not isinstance(self._tokenizer_from, PreTrainedTokenizerBase)
            set_retry(self._storage_retry)
            folder = local_folder(self._tokenizer_from)
            self._encoder = VisionChatEncoder(folder, family=self._vision, group_by=self._group_by)
        if self._encoder is None:
            self._encoder = RecordEncoder(self.tokenizer, group_by=self._group_by)
        return self._encoder

    def replay(
        self, path: str, *, packing: PackingPolicy, given: frozenset[str], multiple: int, packs_per_batch: int
    ) -> tuple[RowEncoder, ReplayPolicy] | None:
        """How rows that were written ahead come as they are; None for other data.

        Args:
            path: of the rows.
            packing: the packing rules.
            given: settings of ``packing`` that were chosen, which the rows have to agree with.
            multiple: that the layout of devices asks for.
            packs_per_batch: rows to a batch.

        Raises:
            ManifestError: if the rows were made by other rules, another tokenizer or encoder, naming each difference.
        """
        manifest = Manifest.read(path)
        if manifest is None:
            return None
        encoder, tokenizer = self._given_encoder, self._given_tokenizer
        # Beside the tokenizer that is given, or that came along with the rows.
        folder = tokenizer if isinstance(tokenizer, str | Path) else f"{path.rstrip('/')}/tokenizer"
        image_processor = row_image_processor(path, manifest, encoder=encoder, folder=folder)
        policy = replayed(
            path,
            manifest,
            packing=packing,
            given=given,
            multiple=multiple,
            encoder=encoder,
            tokenizer=None if tokenizer is None else self.tokenizer,
            group_by=self._group_by,
            packs_per_batch=packs_per_batch,
            vision=self._vision,
            image_processor=image_processor,
        )
        if not manifest.media:
            return RowEncoder(manifest), policy
        own = self.tokenizer if encoder is None else None
        media = row_media(path, manifest, encoder=encoder, image_processor=image_processor, tokenizer=own)
        return RowEncoder(manifest, media=media), policy
