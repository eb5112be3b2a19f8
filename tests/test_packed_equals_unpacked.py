"""The proof: a packed run is the unpacked run. References run each source alone in the model's own attention."""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional as F

from lightning_pack.attention import ATTENTION, STRICT_ATTENTION, ActivatedModel
from lightning_pack.callbacks import PackedAttention
from lightning_pack.module import PackedCausalLM
from lightning_pack.row import PackedBatch
from tests.tiny_models import (
    LENGTHS,
    WINDOW,
    Rows,
    alone_gradients,
    alone_logits,
    alone_loss,
    forward_inputs,
    gradients_of,
    largest_difference,
    make_sources,
    pack_row,
    quiet_trainer,
    tiny_config,
    tiny_model,
)

# Lightning asks torch in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"])
@pytest.mark.parametrize("model_type", MODELS)
def test_logits_loss_and_every_gradient(
    model_type: str, dtype: torch.dtype, tolerance: float, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float64:
        # Norms of some models fall back to float32, whatever the weights are; in both runs they shall not.
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = tiny_model(model_type, dtype=dtype)
    sources = make_sources()
    batch = pack_row(sources, multiple=multiple)
    assert len(batch.source_keys) == len(LENGTHS)
    assert bool((batch.segment_ids == 0).any()) == (multiple > 1)
    sliding = getattr(model.config, "sliding_window", None)
    assert sliding is None or sliding == WINDOW < max(LENGTHS)

    assert model.config._attn_implementation == "sdpa"
    expected_logits = [alone_logits(model, source) for source in sources]
    expected_loss, expected = alone_gradients(model, sources)
    assert all(float(g.abs().max()) > 0 for g in expected.values())
    assert len(expected) == len(list(model.parameters()))

    active = ActivatedModel.of(model)
    assert model.config._attn_implementation == STRICT_ATTENTION
    logits = model(**forward_inputs(batch)).logits
    for number, alone in enumerate(expected_logits):
        assert (logits[batch.segment_ids == number + 1] - alone).abs().max().item() <= tolerance
    loss = F.cross_entropy(logits[0], batch.shift_labels[0], ignore_index=-100)
    assert abs(loss.item() - expected_loss) <= tolerance
    model.zero_grad()
    loss.backward()
    assert largest_difference(gradients_of(model), expected) <= tolerance

    # The loss that the model computes from what the batch passes is the same one.
    assert abs(model(**batch).loss.item() - expected_loss) <= max(tolerance, 1e-6)
    active.restore()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("model_type", "reference"),
    [("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3_moe", "sdpa"), ("cohere2", "sdpa"), ("phi3", "sdpa")],
)
def test_softcaps_sinks_and_experts(model_type: str, reference: str) -> None:
    model = tiny_model(model_type)
    sources = make_sources()
    batch = pack_row(sources, multiple=4)
    assert model.config._attn_implementation == reference
    expected_loss, expected = alone_gradients(model, sources)
    ActivatedModel.of(model)
    loss = F.cross_entropy(model(**forward_inputs(batch)).logits[0], batch.shift_labels[0], ignore_index=-100)
    model.zero_grad()
    loss.backward()
    assert abs(loss.item() - expected_loss) <= 1e-5
    assert largest_difference(gradients_of(model), expected) <= 1e-5


def test_gradient_checkpointing_keeps_the_boundaries() -> None:
    model = tiny_model("gemma3_text")
    batch = pack_row(make_sources(), multiple=4)
    ActivatedModel.of(model)
    found = []
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing is not None:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing)
            assert model.is_activation_checkpointing
        model.zero_grad()
        model(**batch).loss.backward()
        found.append(gradients_of(model))
    assert largest_difference(found[0], found[1]) == 0
    assert largest_difference(found[0], found[2]) == 0


def test_rows_without_boundaries_are_plain_batches() -> None:
    model = tiny_model("mistral", dtype=torch.float64)
    ids = torch.stack([source.input_ids for source in make_sources((11, 11, 11))])
    expected = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(ATTENTION)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-10)


class LossCurve(Callback):
    """Token-weighted mean loss of each optimizer step, from what the module logs for its micro-batches."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.sums: list[float] = []
        self.counts: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: PackedBatch, batch_idx: int
    ) -> None:
        count = int(batch.loss_mask.sum())
        self.sums.append(float(trainer.callback_metrics["train_loss"]) * count)
        self.counts.append(count)

    def steps(self) -> list[float]:
        starts = range(0, len(self.sums), self.accumulate)
        return [sum(self.sums[i : i + self.accumulate]) / sum(self.counts[i : i + self.accumulate]) for i in starts]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_fifty_steps_follow_the_same_curve() -> None:
    steps, accumulate = 50, 2
    # Five steps' worth of rows, over and over; the two rows of a step differ much in targets.
    rows = [[make_sources((9, 4, 14), seed=2 * n), make_sources((3, 6), seed=2 * n + 1)] for n in range(5)]
    rows = [rows[step % 5] for step in range(steps)]
    batches = Rows(*(pack_row(sources, multiple=4) for pair in rows for sources in pair))
    options = {"learning_rate": 3e-3, "weight_decay": 0.1}
    start = tiny_model("qwen3").state_dict()

    module = PackedCausalLM(tiny_config("qwen3"), **options)
    module.configure_model()
    module.model.load_state_dict(start)
    curve = LossCurve(accumulate)
    quiet_trainer(callbacks=[PackedAttention(monitor=False), curve], max_steps=steps, accumulate_grad_batches=accumulate).fit(
        module, batches
    )
    packed = curve.steps()
    assert len(packed) == steps

    twin = PackedCausalLM(tiny_config("qwen3"), **options)
    twin.configure_model()
    twin.model.load_state_dict(start)
    optimizer = twin.configure_optimizers()["optimizer"]
    unpacked = []
    for pair in rows:
        parts = [alone_loss(twin.model, source) for sources in pair for source in sources]
        loss = torch.stack([part for part, _ in parts]).sum() / sum(count for _, count in parts)
        unpacked.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert packed[-1] < packed[0] / 2  # it learned
    counts = [curve.counts[i : i + accumulate] for i in range(0, len(curve.counts), accumulate)]
    assert all(a > 2 * b for a, b in counts)  # a mean of means would be another loss
    assert max(abs(a - b) for a, b in zip(packed, unpacked, strict=True)) <= 1e-4
    assert not math.isclose(packed[0], packed[1])
