"""Token ids for which a model has no embedding are named before a step, and not by a kernel."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pack import BatchFields, PackingPolicy, ParallelLayout
from lightning_pack.attention.vocabulary import embedded_ids, require_embeddings
from lightning_pack.callbacks import PackedAttention
from lightning_pack.collated import pack_collated
from lightning_pack.context import ContextSlice
from lightning_pack.row import PackedBatch
from tests.test_attention_callback import Plain, alone
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_model
from tests.tiny_vision import vision_model

#: Two ranks share a row.
CUT = ParallelLayout(context=2)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def unknown(number: int) -> PackedBatch:
    """A row whose second source has one id that is ``number``."""
    sources = make_sources((5, 7))
    sources[1].input_ids[4] = number
    return pack_row(sources, multiple=4)


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_an_id_without_an_embedding_is_named_before_the_step(stage: str) -> None:
    module = Plain(tiny_model("llama", vocab_size=96))
    getattr(quiet_trainer(callbacks=[alone()], max_epochs=1), stage)(module, Rows(unknown(95)))
    before = len(module.seen)
    told = r"source 's0\.1' has the token id 96, and LlamaForCausalLM embeds ids from 0 to 95: .*resize_token_embeddings, or"
    with pytest.raises(ValueError, match=told):
        getattr(quiet_trainer(callbacks=[alone()], max_epochs=1), stage)(module, Rows(unknown(96)))
    assert len(module.seen) == before, "no step was begun"


def test_an_id_without_an_embedding_is_named_in_padded_batches() -> None:
    module = Plain(tiny_model("llama", vocab_size=96))
    packing = PackedAttention(policy=PackingPolicy(64), monitor=False, token_normalization=False)

    def batch(number: int) -> dict[str, Tensor]:
        ids = torch.tensor([[5, 6, 7, 8], [9, number, 0, 0]])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    quiet_trainer(callbacks=[packing], max_epochs=1).fit(module, Rows(batch(95)))
    with pytest.raises(ValueError, match=r"source 'batch 0, row 1' has the token id 97, and LlamaForCausalLM embeds ids"):
        quiet_trainer(callbacks=[packing], max_epochs=1).fit(module, Rows(batch(97)))


def test_the_largest_id_of_a_padded_batch_comes_with_its_lengths() -> None:
    ids = torch.tensor([[5, 96, 7, 8], [9, 95, 999, 999]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for rows, largest in ((slice(0, 2), 96), (slice(1, 2), 95)):
        batch = {
            "input_ids": ids[rows],
            "attention_mask": mask[rows],
            "labels": ids[rows] * mask[rows] - 100 * (1 - mask[rows]),
        }
        row = pack_collated(batch, policy=PackingPolicy(64))
        assert row is not None
        assert row.largest_id == largest == int(row.input_ids.max())
        # A source that is left out is in no row.
        short = pack_collated(batch, policy=PackingPolicy(3))
        assert short is not None
        assert short.largest_id == 95
    # Of a flattened one nobody knows, and what is known of its places is not said.
    flat = pack_collated({"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 0, 1]])}, policy=None)
    assert flat is not None
    assert flat.largest_id is None


def test_the_largest_id_is_known_without_a_wait_for_the_device() -> None:
    row = unknown(96)
    assert row.largest_id == 96
    (received,) = pickle.loads(ForkingPickler.dumps([row]))
    assert received.largest_id == 96
    # Nothing can be read from there.
    require_embeddings(row.to("meta"), most=97, model="Model")
    with pytest.raises(RuntimeError):
        int(row.to("meta").input_ids.max())
    # A part that does not hold the id is refused too, with the other ranks.
    parts = [ContextSlice.of(unknown(96), layout=CUT, rank=rank) for rank in (0, 1)]
    assert sorted(int(part.input_ids.max()) == 96 for part in parts) == [False, True]
    assert {part.largest_id for part in parts} == {96}


def test_what_stands_for_media_may_lie_beyond_the_table() -> None:
    class Fused(Plain):
        """Puts features of its own in the places of an id that its model does not embed."""

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            features = batch.media["features"] if isinstance(batch, PackedBatch) else batch["features"]
            given = {name: batch[name] for name in batch.keys() if name not in ("input_ids", "features")}  # noqa: SIM118
            places = batch["input_ids"] == 96
            vectors = self.model.get_input_embeddings()(batch["input_ids"].masked_fill(places, 0))
            vectors[places] = features
            return self.model(inputs_embeds=vectors, **given).logits

    row = unknown(96)
    row.media = {"features": torch.ones(1, 32)}
    ids = torch.tensor([[5, 6, 7, 8], [9, 96, 0, 0]])
    padded = {"input_ids": ids, "attention_mask": (ids > 0).long(), "features": torch.ones(1, 32)}
    in_place = PackedAttention(
        policy=PackingPolicy(64), fields=BatchFields(media=("features",)), monitor=False, token_normalization=False
    )
    for callback, batch, width in ((alone(), row, row.width), (in_place, padded, 6)):
        module = Fused(tiny_model("llama", vocab_size=96))
        (found,) = quiet_trainer(callbacks=[callback]).predict(module, Rows(batch))
        assert found.shape == (1, width, 96)


def test_not_every_model_is_given_the_ids() -> None:
    small, large = tiny_model("llama", vocab_size=64), tiny_model("llama", vocab_size=96)
    assert (embedded_ids([small]), embedded_ids([small, large]), embedded_ids([])) == (64, 96, None)
    # Placeholders of images may lie beyond the table.
    assert embedded_ids([vision_model("qwen3_vl")]) is None
