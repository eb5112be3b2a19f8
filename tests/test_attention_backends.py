"""Backends: TransformerEngine's adapter against a strict stand-in, refusals of kernels, the choice between them."""

import copy
import inspect
import logging
import pickle
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pack.attention import (
    ATTENTION,
    ActivatedModel,
    BackendError,
    ModelRefusedError,
    SegmentsBackend,
    THDInputs,
    TransformerEngineBackend,
    VarlenBackend,
    choose_backend,
    inspect_model,
)
from lightning_pack.attention.backends import choice as choices
from lightning_pack.attention.backends.varlen import varlen_unusable
from lightning_pack.callbacks import PackedAttention
from lightning_pack.callbacks.packed_models import PackedModels
from lightning_pack.module import PackedCausalLM
from lightning_pack.pretrained import checkpoint_activations
from tests.architectures import ARCHITECTURES
from tests.reference_attention import reference_attention
from tests.te_stub import SIGNATURES, StubAttention, transformer_engine
from tests.tiny_models import (
    LENGTHS,
    WINDOW,
    Rows,
    forward_inputs,
    gradients_of,
    largest_difference,
    make_sources,
    pack_row,
    quiet_trainer,
    tiny_config,
    tiny_model,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of a loss that weighs every token differently."""
    model.zero_grad()
    logits = model(**forward_inputs(batch)).logits
    weight = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(1))
    (logits * weight).mean().backward()
    return logits.detach(), gradients_of(model)


# --- TransformerEngine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0", "2.20"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_te_gives_what_segments_give(model_type: str, version: str) -> None:
    model = tiny_model(model_type, dtype=torch.float64)
    batch = pack_row(make_sources(), multiple=4)
    assert batch.cu_seqlens is not batch.cu_seqlens_padded
    active = ActivatedModel.of(model)
    expected = outputs(model, batch)
    active.restore()
    names = set(model.state_dict())
    with transformer_engine(version) as kind:
        active = ActivatedModel.of(model, backend=TransformerEngineBackend())
        logits, gradients = outputs(model, batch)
        assert set(model.state_dict()) == names
        assert not any(isinstance(module, StubAttention) for module in model.modules())
        active.restore()
    assert [call["training"] for call in kind.calls] == [True] * model.config.num_hidden_layers
    # One instance serves all layers that are alike; windows reach W - 1 to the left.
    windows = {"mistral": [(WINDOW - 1, 0)], "gemma3_text": [(WINDOW - 1, 0), (-1, 0)]}.get(model_type, [(-1, 0)])
    assert [made["window_size"] for made in kind.made] == windows
    assert [made["num_gqa_groups"] for made in kind.made] == [2] * len(windows)
    assert [("pad_between_seqs" in call) for call in kind.calls] == [version != "2.0"] * len(kind.calls)
    assert float(logits.abs().max()) > 0.1
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=1e-12)
    assert largest_difference(gradients, expected[1]) < 1e-12
    assert not any("_packed_attention_backend" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 4}, "last boundary is 34 but the row has 38 tokens"),
        ({"max_length_q": 11, "max_length_k": 11}, "max_length_q=11 is less than the longest source of 12 tokens"),
    ],
)
def test_a_first_row_with_wrong_boundaries_does_not_reach_a_kernel(changes: dict[str, int], message: str) -> None:
    model = tiny_model("llama")
    batch = pack_row(make_sources())
    inputs = {**forward_inputs(batch), **{name: value for name, value in changes.items() if name != "tokens"}}
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert embedded.shape[1] == 34
    if "tokens" in changes:
        # As prompt tuning does: tokens of its own in front, positions left to the model.
        embedded = torch.cat([embedded[:, : changes["tokens"]], embedded], dim=1)
        del inputs["position_ids"]
    with transformer_engine("2.20") as kind:
        active = ActivatedModel.of(model, backend=TransformerEngineBackend())
        with pytest.raises(ValueError, match=message):
            model(inputs_embeds=embedded, **inputs)
        assert kind.calls == []
        model(**forward_inputs(batch))
        assert len(kind.calls) == 2
        active.restore()
    assert not any(name.startswith("_packed_attention") for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("version", SIGNATURES)
def test_te_passes_only_names_that_a_version_has(version: str) -> None:
    row = [torch.randn(6, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2)]
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    with transformer_engine(version) as kind:
        out = TransformerEngineBackend()(*row, inputs=THDInputs(cu, cu, 4, 6), window=2, scale=0.3)
    (made,), (call,) = kind.made, kind.calls
    init, forward = SIGNATURES[version]
    assert made.keys() <= set(init)
    assert call.keys() - {"training"} <= set(forward)
    expected = reference_attention(*row, offsets=[0, 2, 6], scale=0.3, window=2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_the_stand_in_refuses_what_the_real_one_would() -> None:
    row = [torch.ones(6, heads, 8) for heads in (4, 2, 2)]
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    right = {"query_layer": row[0], "key_layer": row[1], "value_layer": row[2], "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    right |= {"max_seqlen_q": 6, "max_seqlen_kv": 6, "cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu}
    right["pad_between_seqs"] = False
    short = torch.tensor([0, 2, 5], dtype=torch.int32)
    with transformer_engine("2.20") as kind:
        TransformerEngineBackend()(*row, inputs=THDInputs(cu, cu, 4, 6))
        layer = kind(**kind.made[0])
        layer(**right)
        for changes in (
            {"pad_between_seqs": None},
            {"cu_seqlens_q_padded": cu.clone()},
            {"max_seqlen_q": torch.tensor(6)},
            {"max_seqlen_kv": 5},
            {"key_layer": row[1].double()},
            {"query_layer": row[0].transpose(0, 1)},
            {"softness": 1},
            dict.fromkeys([name for name in right if "cu_" in name], short),
            dict.fromkeys([name for name in right if "cu_" in name], cu.long()),
        ):
            with pytest.raises(AssertionError):
                layer(**{**right, **changes})
        with pytest.raises(AssertionError, match="by keyword"):
            layer(*row)


def test_te_where_activations_are_computed_again() -> None:
    model = tiny_model("mistral", dtype=torch.float64)
    batch = pack_row(make_sources(), multiple=4)
    active = ActivatedModel.of(model)
    expected = outputs(model, batch)
    active.restore()
    checkpoint_activations(model)
    with transformer_engine("2.20") as kind:
        ActivatedModel.of(model, backend=TransformerEngineBackend())
        logits, gradients = outputs(model, batch)
    assert len(kind.calls) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=1e-12)
    assert largest_difference(gradients, expected[1]) < 1e-12


def test_te_follows_the_mode_of_the_layer() -> None:
    model = tiny_model("llama")
    batch = pack_row(make_sources())
    with transformer_engine("2.20") as kind:
        ActivatedModel.of(model, backend=TransformerEngineBackend())
        for training in (True, False, True):
            kind.calls.clear()
            model.train(training)(**forward_inputs(batch))
            assert [call["training"] for call in kind.calls] == [training] * 2


def test_te_rounds_the_longest_source_so_that_kernels_are_not_chosen_anew() -> None:
    row = [torch.ones(200, 1, 8)] * 3
    with transformer_engine("2.20") as kind:
        backend = TransformerEngineBackend()
        for cut in (3, 90, 180):
            cu = torch.tensor([0, cut, 200], dtype=torch.int32)
            backend(*row, inputs=THDInputs(cu, cu, max(cut, 200 - cut), 200))
    assert [call["max_seqlen_q"] for call in kind.calls] == [200, 128, 200]
    assert len(kind.made) == 1


def test_te_gets_one_dtype_under_autocast() -> None:
    model = tiny_model("qwen3")  # its norms of queries and keys have float32 weights
    batch = pack_row(make_sources())
    active = ActivatedModel.of(model)
    expected = outputs(model, batch)[0]
    active.restore()
    with transformer_engine("2.20") as kind, torch.autocast("cpu", torch.bfloat16):
        ActivatedModel.of(model, backend=TransformerEngineBackend())
        logits = model(**forward_inputs(batch)).logits
    assert {call[f"{name}_layer"].dtype for call in kind.calls for name in ("query", "key", "value")} == {torch.bfloat16}
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


def test_a_model_that_is_switched_on_can_be_copied_and_pickled() -> None:
    model = tiny_model("llama")
    batch = pack_row(make_sources())
    with transformer_engine("2.20") as kind:
        ActivatedModel.of(model, backend=TransformerEngineBackend())
        expected = model(**forward_inputs(batch)).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            kind.calls.clear()
            assert torch.equal(twin(**forward_inputs(batch)).logits, expected)
            assert len(kind.calls) == 2


def test_plain_rows_are_sources_of_equal_length() -> None:
    model = tiny_model("llama", dtype=torch.float64).eval()
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, use_cache=False).logits
    with transformer_engine("2.20") as kind:
        ActivatedModel.of(model, attention=ATTENTION, backend=TransformerEngineBackend())
        logits = model(input_ids=ids, use_cache=False).logits
        assert kind.calls[0]["cu_seqlens_q"].tolist() == [0, 9, 18, 27]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


# --- what is not computed --------------------------------------------------------------------------------------------------

REFUSED = {
    "dropout=0.1: its kernels": {"dropout": 0.1},
    "softcap=2.0: its kernels": {"softcap": 2.0},
    "sinks: its kernels": {"sinks": torch.zeros(2)},
    "causal=False: real tokens would see pads": {"causal": False},
}


@pytest.mark.parametrize("name", ["te", "varlen"])
@pytest.mark.parametrize("message", REFUSED)
def test_options_without_kernels_are_refused_by_name(name: str, message: str) -> None:
    row, cu = [torch.ones(4, 2, 8)] * 3, torch.tensor([0, 4], dtype=torch.int32)
    with transformer_engine("2.20"):
        backend: Any = TransformerEngineBackend() if name == "te" else VarlenBackend()
        with pytest.raises(BackendError, match=f"backend '{name}' does not compute {message}.*backend='segments'"):
            backend(*row, inputs=THDInputs(cu, cu, 4, 4), **REFUSED[message])
        real = torch.tensor([0, 3], dtype=torch.int32)
        with pytest.raises(BackendError, match=f"backend '{name}' does not compute real boundaries with gaps.*physical"):
            backend(*row, inputs=THDInputs(real, cu, 4, 4, pad_between_seqs=True))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {}, r"soft-capped scores \(attn_logit_softcapping=50.0\)"),
        ("gpt_oss", {}, r"attention sinks \(model.layers.0.self_attn.sinks\)"),
        ("llama", {"attention_dropout": 0.1}, r"dropout of attention weights \(attention_dropout=0.1; 0 switches it off\)"),
    ],
)
def test_models_that_ask_for_it_are_refused_before_the_first_step(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    model = tiny_model(model_type, **changes)
    assert inspect_model(model, backend=SegmentsBackend()) == inspect_model(model) == []
    with transformer_engine("2.20") as kind:
        for backend in (TransformerEngineBackend(), VarlenBackend()):
            with pytest.raises(ModelRefusedError, match=f"'{backend.name}' does not compute {message}; set .*'segments'"):
                ActivatedModel.of(model, backend=backend)
    assert kind.made == []
    assert model.config._attn_implementation != ATTENTION


def test_varlen_refuses_heads_without_a_kernel_also_where_layers_differ() -> None:
    gemma = next(a for a in ARCHITECTURES if a.model_type == "gemma4_text")
    model = replace(gemma, config={**gemma.config, "global_head_dim": 512}).build()
    assert [layer.head_dim for layer in model.config.per_layer_config] == [8, 512] * 2
    assert list(VarlenBackend().refusals(model)) == ["heads of 512 (only multiples of 8 up to 256)"]


def test_varlen_refuses_heads_without_a_kernel() -> None:
    model = tiny_model("llama", head_dim=12)
    (finding,) = inspect_model(model, backend=VarlenBackend())
    assert finding.reason == "backend 'varlen' does not compute heads of 12 (only multiples of 8 up to 256)"
    assert inspect_model(tiny_model("llama"), backend=VarlenBackend()) == []


def test_varlen_refuses_other_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    row, cu = [torch.ones(4, 2, 8)] * 3, torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(BackendError, match=r"backend 'varlen' runs on CUDA devices, and the model is on cpu; use .*'segments'"):
        VarlenBackend()(*row, inputs=THDInputs(cu, cu, 4, 4))
    assert "in float32 (precision='bf16-mixed' changes that)" in str(varlen_unusable(CUDA, torch.float32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    assert varlen_unusable(CUDA, torch.float16) == "needs compute capability 8.0, and Old has less"


def test_varlen_calls_the_kernel_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    # Without a device the call itself is checked against the real signature, and answered by the formulas.
    real = inspect.signature(varlen.varlen_attn)
    seen: list[dict[str, Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        call = real.bind(*args, **kwargs).arguments
        seen.append(call)
        left, right = call["window_size"]
        assert right == 0
        return reference_attention(
            call["query"],
            call["key"],
            call["value"],
            offsets=call["cu_seq_q"].tolist(),
            scale=call["scale"],
            window=None if left < 0 else left + 1,
        )

    kernel.__signature__ = real  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr("lightning_pack.attention.backends.varlen.varlen_unusable", lambda device, dtype: None)
    model = tiny_model("gemma3_text", dtype=torch.float64)
    batch = pack_row(make_sources(), multiple=4)
    active = ActivatedModel.of(model)
    expected = outputs(model, batch)
    active.restore()
    ActivatedModel.of(model, backend=VarlenBackend())
    logits, gradients = outputs(model, batch)
    assert [call["window_size"] for call in seen] == [(WINDOW - 1, 0), (-1, 0)]
    assert all(call["cu_seq_q"] is call["cu_seq_k"] is batch.cu_seqlens_padded for call in seen)
    assert all((call["max_q"], call["max_k"], call["enable_gqa"]) == (12, 12, True) for call in seen)
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=1e-12)
    assert largest_difference(gradients, expected[1]) < 1e-12


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda query, is_causal: query)
    with pytest.raises(BackendError, match=r"needs varlen_attn with enable_gqa, scale, window_size.*upgrade torch"):
        VarlenBackend()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(BackendError, match=r"needs torch.nn.attention.varlen, which torch .* does not have"):
        VarlenBackend()


# --- the choice ------------------------------------------------------------------------------------------------------------


def test_te_that_is_missing_or_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "transformer_engine" not in sys.modules
    with pytest.raises(BackendError, match=r"not installed: pip install .*'transformer-engine\[pytorch\]', or use"):
        TransformerEngineBackend()
    package, broken = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(OSError("libcudnn.so.9: not found"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", broken)
    with pytest.raises(BackendError, match=r"installed and cannot be imported \(OSError: libcudnn.so.9: not found\)"):
        TransformerEngineBackend()


def test_named_backends_that_cannot_run_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(BackendError, match=r"backend='flash': choose one of 'auto', 'te', 'varlen', 'segments'"):
        PackedAttention(backend="flash")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="needs TransformerEngine, which is not installed"):
        choose_backend("te", model, device=CPU, dtype=torch.bfloat16)
    with transformer_engine("2.20"), pytest.raises(BackendError, match="'te' runs on CUDA devices, and the model is on cpu"):
        choose_backend("te", model, device=CPU, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="'varlen' runs on CUDA devices"):
        choose_backend("varlen", model, device=CPU, dtype=torch.bfloat16)
    assert choose_backend("segments", model, device=CPU, dtype=torch.float32).backend.name == "segments"


def test_auto_takes_the_first_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    llama, gemma = tiny_model("llama"), tiny_model("gemma2")

    def auto(model: Any, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16) -> tuple[str, str]:
        chosen = choose_backend("auto", model, device=device, dtype=dtype)
        return chosen.backend.name, str(chosen)

    name, told = auto(llama, CPU)
    assert name == "segments"
    assert "'te' runs on CUDA devices, and the model is on cpu; 'varlen' runs on CUDA" in told
    name, told = auto(llama)
    assert name == "varlen"
    assert told.endswith("not installed: pip install --no-build-isolation 'transformer-engine[pytorch]')")
    name, told = auto(llama, dtype=torch.float32)
    assert (name, "computes in float32; 'varlen'" in told) == ("segments", True)
    with transformer_engine("2.20"):
        assert auto(llama)[0] == "te"
        name, told = auto(gemma)
        assert name == "segments"
        assert "'te' does not compute soft-capped scores" in told
        assert "'varlen' does not compute soft-capped scores" in told


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-true", torch.float16), ("32-true", torch.float32)]
)
def test_the_choice_knows_in_what_attention_is_computed(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(choices, "_fastest", lambda model, **given: seen.append(given))
    trainer: Any = SimpleNamespace(precision=precision, strategy=SimpleNamespace(root_device=CUDA))
    PackedModels("auto")._choose(trainer, tiny_model("llama"))
    assert seen == [{"device": CUDA, "dtype": dtype, "context": None}]


def test_a_run_tells_its_backend_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = PackedAttention(monitor=False)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1)
    module, rows = PackedCausalLM(tiny_config("llama")), Rows(pack_row(make_sources(LENGTHS)))
    with caplog.at_level(logging.INFO):
        trainer.fit(module, rows)
        trainer.validate(module, rows, verbose=False)
    told = [record.message for record in caplog.records if record.message.startswith("Packed attention of")]
    assert len(told) == 1
    assert told[0].startswith("Packed attention of LlamaForCausalLM: backend 'segments' ('te' runs on CUDA devices")
    assert not any("_packed_attention_backend" in vars(layer) for layer in module.modules())


def test_a_run_on_te_trains_as_one_on_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "te_unusable", lambda device, dtype: None)
    rows = Rows(*(pack_row(make_sources(seed=seed), multiple=4) for seed in range(3)))
    weights = []
    for backend in ("segments", "te"):
        torch.manual_seed(0)
        module = PackedCausalLM({**tiny_config("mistral"), "dtype": "float64"}, learning_rate=1e-2)
        trainer = quiet_trainer(callbacks=[PackedAttention(backend=backend, monitor=False)], max_epochs=1, precision="64-true")
        with transformer_engine("2.20") as kind:
            trainer.fit(module, rows, rows)
        assert trainer.global_step == 3
        assert [call["training"] for call in kind.calls].count(True) == (3 * 2 if backend == "te" else 0)
        weights.append({name: value.detach().clone() for name, value in module.named_parameters()})
    assert largest_difference(*weights) < 1e-10


def test_a_backend_that_is_missing_ends_the_run_before_its_first_step() -> None:
    module = PackedCausalLM(tiny_config("llama"))
    trainer = quiet_trainer(callbacks=[PackedAttention(backend="te", monitor=False)], max_epochs=1)
    with pytest.raises(BackendError, match="not installed"):
        trainer.fit(module, Rows(pack_row(make_sources())))
    assert trainer.global_step == 0
