"""Images in an object store: read when they are needed, missing ones left out; a store that is away is not their fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.energon.epathlib import EPath

from lightning_pack.encoders import LeaveOut, VisionChatEncoder
from lightning_pack.energon import storage
from lightning_pack.energon.outage import StorageError, StorageRetry
from lightning_pack.energon.task_encoder import tried
from tests.object_store import Proxy, Server, forget_clients, write_configuration
from tests.test_vision_encoder import IMAGE, with_messages
from tests.tiny_vision import picture, vision_encoder

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    pytest.importorskip("moto")
    server = Server(tmp_path)
    proxy = Proxy(server.port)
    ports = {"pictures": server.port, "away": proxy.port}
    monkeypatch.setenv("MSC_CONFIG", str(write_configuration(tmp_path / "msc.yaml", ports, timeouts={})))
    (tmp_path / "0.png").write_bytes(picture(0))
    EPath(tmp_path / "0.png").copy(EPath("msc://pictures/data/chats/0.png"))
    storage.set_retry(StorageRetry(outage_seconds=1))
    try:
        yield proxy
    finally:
        storage.set_retry(StorageRetry())
        proxy.close()
        server.close()
        forget_clients()


def test_images_in_a_store(proxy: Proxy) -> None:
    encoder: VisionChatEncoder = vision_encoder(image_root="msc://away/data/chats")
    named = [{"type": "image", "image": "0.png"}]
    source = encoder("far", with_messages(named))
    assert source.held_media == 0
    expected = encoder("near", with_messages(IMAGE, files={"0.png": picture(0)})).completed()
    assert torch.equal(source.completed().media["pixel_values"], expected.media["pixel_values"])
    with pytest.raises(LeaveOut, match=r"sample 'far': image 'none.png' cannot be read") as caught:
        encoder("far", with_messages([{"type": "image", "image": "none.png"}]))
    assert caught.value.reason == "image"

    proxy.set_mode("refused")
    # Neither when its size is asked for nor when it is decoded.
    with pytest.raises(StorageError, match="msc://away"):
        tried("far", lambda: encoder("far", with_messages(named)))
    with pytest.raises(StorageError, match="msc://away"):
        tried("far", source.completed)
    proxy.set_mode("pass")
    assert torch.equal(source.completed().media["pixel_values"], expected.media["pixel_values"])
