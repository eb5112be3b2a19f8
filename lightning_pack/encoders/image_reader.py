"""From encoded images to what a model takes: measured by their headers, decoded and processed when their pack is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.families import ImageSize, VisionFamily
from lightning_pack.encoders.images import EncodedImage
from lightning_pack.media import Media, MediaFile, nbytes
from lightning_pack.source import EncodedSource


@dataclass(frozen=True)
class DeferredImages:
    """The images of one source, still encoded."""

    reader: ImageReader
    images: tuple[EncodedImage, ...]
    #: What each becomes.
    sizes: tuple[ImageSize, ...]

    @property
    def held(self) -> int:
        """Bytes of the files that are in memory."""
        return sum(image.held for image in self.images)

    def complete(self, source: EncodedSource) -> EncodedSource:
        """The source with its pixels and M-RoPE positions.

        Raises:
            LeaveOut: as ``image``, if an image cannot be decoded or is not as large as its header says.
        """
        return self.reader.processed(source, self.images, [size.tokens for size in self.sizes])


@dataclass(frozen=True)
class ImageReader:
    """Images for the models of one family. Neither tokenizer nor chat template are needed once a chat is tokens.

    Args:
        image_processor: a transformers image processor.
        family: of the models.
        image_token_id: placeholder.
    """

    image_processor: Any
    family: VisionFamily
    image_token_id: int

    def size(self, image: EncodedImage) -> ImageSize:
        """What an image becomes; only its header is read.

        Raises:
            LeaveOut: as ``image``, if it cannot be read, or the image processor refuses its size.
        """
        height, width = image.size()
        try:
            return self.family.size(self.image_processor, height, width)
        except ValueError as error:
            raise LeaveOut(
                "image", f"image {image.name!r} of {height} x {width} pixels is refused: {error}", "image size refused"
            ) from error

    def attached(self, source: EncodedSource, images: Sequence[EncodedImage], sizes: Sequence[ImageSize]) -> EncodedSource:
        """The source with its images, which are deferred; one without images gets its positions at once."""
        if images:
            deferred = DeferredImages(self, tuple(images), tuple(sizes))
            tokens, held = sum(size.tokens for size in sizes), sum(size.nbytes for size in sizes)
            return replace(source, deferred=deferred, media_tokens=tokens, media_bytes=held)
        if self.family.positions is None:
            return source
        return replace(source, mrope=torch.arange(len(source)).expand(3, -1))

    def files_of(self, source: EncodedSource) -> list[MediaFile]:
        """The images of a source that was just encoded, as their files are.

        Raises:
            LeaveOut: as ``image``, if one cannot be read.
        """
        deferred = source.deferred
        if deferred is None:
            return []
        assert isinstance(deferred, DeferredImages)
        found = []
        for image, size in zip(deferred.images, deferred.sizes, strict=True):
            content = image.read()
            kind = EncodedImage(image.name, content=content).kind()
            found.append(MediaFile(content, kind=kind, tokens=size.tokens, nbytes=size.nbytes))
        return found

    def with_files(self, source: EncodedSource, files: Sequence[MediaFile]) -> EncodedSource:
        """The source as it was encoded, from one that has its tokens and labels alone, and its image files."""
        images = [EncodedImage(f"{number}.{file.kind}", content=file.content) for number, file in enumerate(files)]
        return self.attached(source, images, [ImageSize(tokens=file.tokens, nbytes=file.nbytes) for file in files])

    def processed(self, source: EncodedSource, images: Sequence[EncodedImage], tokens: Sequence[int]) -> EncodedSource:
        """The source with the tensors of its images, which have so many tokens each.

        Raises:
            LeaveOut: as ``image``, if an image cannot be decoded or is not as large as its header says.
        """
        try:
            media = self._tensors(images)
        except LeaveOut as error:
            raise LeaveOut(error.reason, f"sample {source.key!r}: {error}", error.problem) from error
        grids = media[self.family.grid]
        merge_size = self.image_processor.merge_size
        made = [int(count) // merge_size**2 for count in grids.prod(-1)]
        if made != list(tokens):
            raise LeaveOut(
                "image",
                f"sample {source.key!r}: its images became {made} tokens, but by their headers they have {list(tokens)}: a "
                "file changed while the run was reading it, or the image processor's get_number_of_image_patches is not exact",
                "image size changed",
            )
        positions = self.family.positions
        mrope = (
            None
            if positions is None
            else positions(source.input_ids, grids, image_token_id=self.image_token_id, merge_size=merge_size)
        )
        return replace(source, media=media, mrope=mrope, deferred=None, media_bytes=nbytes(media))

    def _tensors(self, images: Sequence[EncodedImage]) -> Media:
        pixels = [image.decoded() for image in images]
        encoded = self.image_processor(images=pixels, return_tensors="pt")
        return {name: encoded[name] for name in self.family.tensors}
