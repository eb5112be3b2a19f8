"""The check of a model: its verdicts, that it sees leaks, and that it leaves the model as it was."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_pack import isolation_check
from lightning_pack.attention import STRICT_ATTENTION, ActivatedModel, IsolationVerdict, ModelRefusedError, inspect_model
from tests.architectures import ARCHITECTURES, BEGIN, END, README, Architecture, expected, in_readme, table
from tests.tiny_models import LENGTHS, forward_inputs, make_sources, pack_row, tiny_config, tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.model_type)
def test_every_architecture_is_isolated_or_refused_with_the_reason(architecture: Architecture) -> None:
    result = architecture.run()
    if architecture.refused is not None:
        assert isinstance(result, list)
        assert any(architecture.refused in reason for reason in result), result
        return
    assert isinstance(result, IsolationVerdict), result
    assert result.isolated, str(result)
    # Far from the limits, so that neither verdict hangs on them.
    assert max(source.alone for source in result.sources) < result.alone_limit / 20


def test_the_readme_has_the_table_of_models() -> None:
    assert README.read_text().count(BEGIN) == README.read_text().count(END) == 1
    assert set(expected().values()) == {"isolated", "refused"}
    assert len(expected()) == len(ARCHITECTURES) >= 18
    assert in_readme() == table(expected()), "run: python -m tests.architectures --write"


# --- verdicts ----------------------------------------------------------------------------------------------------------------


def test_the_verdict_tells_of_every_source() -> None:
    verdict = isolation_check(tiny_model("llama"), tokens=40, sources=4, seed=3)
    assert verdict.isolated
    assert (verdict.model, verdict.dtype, verdict.device, verdict.reference) == ("LlamaForCausalLM", "float32", "cpu", "sdpa")
    assert [source.number for source in verdict.sources] == [0, 1, 2, 3]
    lengths = [source.tokens for source in verdict.sources]
    assert sum(lengths) == 40
    assert lengths[1] == 1
    assert len(set(lengths)) > 2
    assert all(source.moved == 0 and source.moved_by is None for source in verdict.sources)
    # Two ways to compute the same: close, not equal.
    assert 0 < max(source.alone for source in verdict.sources) < 1e-4
    assert 0 < verdict.moved_limit < verdict.alone_limit < verdict.scale
    assert str(verdict).splitlines()[0] == "LlamaForCausalLM (float32, cpu): isolated"
    assert len(str(verdict).splitlines()) == 7
    with pytest.raises(FrozenInstanceError):
        verdict.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("gemma2", torch.float64),
        *((kind, dtype) for kind in ("gemma2", "gpt_oss") for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_every_precision_has_its_limits(model_type: str, dtype: torch.dtype) -> None:
    model = tiny_model(model_type, dtype=dtype)
    verdict = isolation_check(model)
    assert verdict.isolated, str(verdict)
    assert f"torch.{verdict.dtype}" == str(dtype)
    assert verdict.reference == "eager"


class Neighbours(LlamaForCausalLM):
    """Each token sees a little of the one before, whichever source that is of."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embedded + 0.01 * embedded.roll(1, dims=1), position_ids=position_ids, **inputs)


class Places(LlamaForCausalLM):
    """Each token knows its place in the row."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        places = torch.arange(input_ids.shape[1], dtype=embedded.dtype, device=embedded.device)
        return super().forward(inputs_embeds=embedded + 0.01 * places[:, None], position_ids=position_ids, **inputs)


def llama(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    values = tiny_config("llama")
    model = kind(LlamaConfig(**values))
    model.load_state_dict(tiny_model("llama").state_dict())
    return model


def test_a_leak_that_inspection_cannot_know_is_seen() -> None:
    model = llama(Neighbours)
    assert inspect_model(model) == []
    verdict = isolation_check(model)
    assert not verdict.isolated
    # The pad behind the single token of source 1 keeps that from source 2.
    assert verdict.leaking == (1, 3, 4)
    assert [verdict.sources[number].moved_by for number in verdict.leaking] == [0, 2, 3]
    text = str(verdict)
    assert text.splitlines()[0].startswith("Neighbours (float32, cpu): NOT isolated, ")
    assert [line.partition("sees ")[2][:8] for line in text.splitlines() if "sees source" in line] == [
        f"source {n}" for n in (0, 2, 3)
    ]


def test_a_source_that_is_not_what_it_is_alone_is_seen() -> None:
    model = llama(Places)
    assert inspect_model(model) == []
    verdict = isolation_check(model)
    assert not verdict.isolated
    assert verdict.leaking == ()
    # The first source is in the same place either way.
    assert verdict.different == (1, 2, 3, 4)
    assert str(verdict).count("not as alone") == 4


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "mamba2", "granitemoehybrid", "lfm2", "minimax"])
def test_the_leaks_of_refused_models_would_be_seen(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(a for a in ARCHITECTURES if a.model_type == model_type).build()
    assert inspect_model(model) != []
    for module in ("check", "activation"):
        monkeypatch.setattr(f"lightning_pack.attention.{module}.require_packable", lambda model, **_: None)
    verdict = isolation_check(model)
    assert verdict.leaking == verdict.different == (1, 2, 3, 4)


# --- the model afterwards ----------------------------------------------------------------------------------------------------


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a check could change, as values."""
    inner = {
        name: {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, (bool, int, float, str))}
        for name, module in model.named_modules()
    }
    return {
        "modules": inner,
        "objects": {name: id(buffer) for name, buffer in model.named_buffers()},
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "weights": {name: (id(p), p.tolist(), p.grad.tolist()) for name, p in model.named_parameters() if p.grad is not None},
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "random": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
    }


def prepared(model_type: str, **changes: Any) -> PreTrainedModel:
    model = tiny_model(model_type, attention_dropout=0.1, **changes)
    model.model.layers[0].eval()
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits.sum().backward()
    return model


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 32}


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("llama", DYNAMIC), ("gpt_oss", {})])
def test_the_model_is_left_as_it_was(model_type: str, changes: dict[str, Any]) -> None:
    model = prepared(model_type, **changes)
    before = state(model)
    assert before["weights"]
    assert before["config"]["use_cache"] is True
    assert isolation_check(model).isolated
    assert state(model) == before
    nn.init.zeros_(model.lm_head.weight)
    before = state(model)
    with pytest.raises(ValueError, match=r"same logits for source 0 whatever its tokens are.*are its weights loaded"):
        isolation_check(model)
    assert state(model) == before


def test_a_model_that_is_switched_already_stays_switched() -> None:
    model = tiny_model("llama")
    active = ActivatedModel.of(model)
    verdict = isolation_check(model)
    assert verdict.isolated
    assert verdict.reference == "sdpa"
    assert (model.config._attn_implementation, model.config.use_cache) == (STRICT_ATTENTION, False)
    active.restore()
    assert (model.config._attn_implementation, model.config.use_cache) == ("sdpa", True)


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_checked_is_refused_with_the_way_out() -> None:
    bloom = next(a for a in ARCHITECTURES if a.model_type == "bloom").build()
    with pytest.raises(ModelRefusedError, match=r"BloomForCausalLM: its code does not use transformers' attention interface"):
        isolation_check(bloom)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"ModuleList holds 2 models \(LlamaForCausalLM, Qwen2ForCausalLM\): check each"):
        isolation_check(nn.ModuleList([model, tiny_model("qwen2")]))
    with pytest.raises(ValueError, match=r"tokens=14, sources=5: the check needs at least 3 sources, and 3 tokens a source"):
        isolation_check(model, tokens=14)
    with pytest.raises(ValueError, match=r"tokens=600 in 5 sources make one of \d+, .*max_position_embeddings=128: give fewer"):
        isolation_check(model, tokens=600)
    with pytest.raises(ValueError, match=r"has no weights \(device meta\)"):
        isolation_check(copy.deepcopy(model).to("meta"))
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in float32.*check it in float32"):
        isolation_check(model)
    with pytest.raises(
        ValueError, match=r"GptOssForCausalLM does not run a plain sample of \d+ tokens in float64 on cpu .*another"
    ):
        isolation_check(tiny_model("gpt_oss", dtype=torch.float64))
    without_head = tiny_model("llama").model
    with pytest.raises(ValueError, match=r"LlamaModel gives no logits for 12 tokens.*such as AutoModelForCausalLM"):
        isolation_check(without_head)
    pooled = AutoModelForSequenceClassification.from_config(without_head.config)
    with pytest.raises(ValueError, match=r"Classification gives logits of shape \[1, 2\] for 12 tokens"):
        isolation_check(pooled)
    broken = tiny_model("llama")
    broken.model.norm = None
    with pytest.raises(ValueError, match=r"does not run a plain sample .*TypeError: 'NoneType' object is not callable"):
        isolation_check(broken)
    assert isolation_check(nn.Sequential(tiny_model("llama"))).model == "LlamaForCausalLM"


class Scaling(LlamaForCausalLM):
    """Reads the mask that its layers get."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        hook = self.model.layers[0].self_attn.register_forward_pre_hook(self.read, with_kwargs=True)
        try:
            return super().forward(input_ids=input_ids, position_ids=position_ids, **inputs)
        finally:
            hook.remove()

    @staticmethod
    def read(module: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs["attention_mask"] is not None:
            kwargs["attention_mask"].sum()


def test_code_that_computes_with_a_mask_is_refused() -> None:
    with pytest.raises(ModelRefusedError, match=r"Scaling runs a plain sample, .*AttributeError: sum: .*train it unpacked"):
        isolation_check(llama(Scaling))


def test_layers_that_share_keys_need_the_whole_row() -> None:
    model = next(a for a in ARCHITECTURES if a.model_type == "gemma4_text").build()
    assert model.config.num_kv_shared_layers > 0
    ActivatedModel.of(model)
    inputs = forward_inputs(pack_row(make_sources()))
    assert model(**inputs).logits.shape[1] == sum(LENGTHS)
    with pytest.raises(
        ValueError, match=r"takes the part \(.*slice\(-2, None, None\).* of its mask: .*leave logits_to_keep at 0"
    ):
        model(**inputs, logits_to_keep=2)


LONG = {
    "original_max_position_embeddings": 8,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize(("model_type", "changes"), [("phi3", LONG), ("llama", {**DYNAMIC, "max_position_embeddings": 8})])
def test_a_row_whose_longest_source_changes_the_others_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    model = tiny_model(model_type, **changes).eval()
    sources = make_sources((5, 12))
    with torch.no_grad():
        # It is so in transformers: the short source beside a long one is not what it is alone.
        row = {k: v for k, v in forward_inputs(pack_row(sources)).items() if k in ("input_ids", "position_ids", "use_cache")}
        alone = model(input_ids=sources[0].input_ids[None], use_cache=False).logits[0]
        assert float((model(**row).logits[0, :5] - alone).abs().max()) > 1e-3
        ActivatedModel.of(model)
        with pytest.raises(ValueError, match=r"sources of 5 and 12 tokens share a row, and beyond 8 .*the capacity to 8"):
            model(**forward_inputs(pack_row(sources)))
        for fine in ((5, 8), (12,)):
            assert model(**forward_inputs(pack_row(make_sources(fine)))).logits.isfinite().all()
        if changes is LONG:
            assert model(**forward_inputs(pack_row(make_sources((9, 12))))).logits.isfinite().all()


# --- from the shell ----------------------------------------------------------------------------------------------------------


def check_model(*args: object) -> int:
    from lightning_pack import cli

    try:
        cli.main(["check-model", *map(str, args)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(tiny_config("llama")))
    return path


def test_a_configuration_is_checked_with_random_weights(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    assert check_model(config_file, "--tokens", 30, "--sources", 3) == 0
    assert torch.equal(before, torch.get_rng_state())
    out = capsys.readouterr().out
    assert f"LlamaForCausalLM of {config_file}, " in out
    assert "inspection: nothing speaks against packed rows" in out
    assert "weights: drawn at random, the path has none" in out
    assert "LlamaForCausalLM (float32, cpu): isolated" in out
    assert len(out.splitlines()) == 9


def test_a_folder_is_checked_with_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    assert check_model(tmp_path, "--dtype", "bfloat16") == 0
    out = capsys.readouterr().out
    assert f"weights: of {tmp_path}\n" in out
    assert "Qwen2ForCausalLM (bfloat16, cpu): isolated" in out


def test_a_vision_language_model_is_checked_by_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(a for a in ARCHITECTURES if a.model_type == "llava").build().config.save_pretrained(tmp_path)
    assert check_model(tmp_path) == 0
    assert "LlavaForConditionalGeneration (float32, cpu): isolated" in capsys.readouterr().out


def test_a_refused_model_tells_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mamba = next(a for a in ARCHITECTURES if a.model_type == "mamba").build()
    mamba.config.save_pretrained(tmp_path)
    assert check_model(tmp_path) == 1
    out = capsys.readouterr().out
    assert "refused: packed rows are not safe with this model" in out
    assert "  - it mixes tokens of the whole row in Conv1d, MambaMixer" in out
    assert out.count("way out: train this model unpacked") == 1


def test_a_model_that_is_not_isolated_ends_with_1(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = isolation_check(llama(Neighbours))
    assert not verdict.isolated
    monkeypatch.setattr("lightning_pack.attention.check.isolation_check", lambda model, **options: verdict)
    assert check_model(config_file) == 1


def test_nothing_is_asked_of_the_hub_and_help_is_quick(config_file: Path) -> None:
    code = (
        "import sys\n"
        "from lightning_pack import cli\n"
        "try: cli.main(['check-model', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
        f"cli.main(['check-model', {str(config_file)!r}])\n"
        "from huggingface_hub import constants\n"
        "assert constants.HF_HUB_OFFLINE\n"
        "assert 'lightning' not in sys.modules\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "isolated" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a folder with a config.json nor a configuration file, and nothing is downloaded"),
        ("model: llama", "is no JSON (Expecting value"),
        ("[1]", "holds a list and not the fields of a model"),
        ('{"model_type": "lama"}', "model_type='lama' is not known to this version of transformers"),
        ('{"model_type": "vit"}', "'vit' is no causal language model"),
        ('{"model_type": "llama", "hidden_size": "64"}', "makes no configuration of it (StrictDataclassFieldValidationError"),
        ('{"model_type": "llama", "hidden_act": "no"}', "builds no model of it (KeyError: "),
        ('{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 100000000000}', "GB: give --dtype bfloat16, or a copy"),
    ],
)
def test_what_is_no_model_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    assert check_model(path) == 1
    error = capsys.readouterr().err
    assert "lightning-pack: error: " in error
    assert message in error
    assert str(path) in error


@pytest.mark.parametrize("broken", ["damaged", "of another size"])
def test_weights_that_do_not_load_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert check_model(tmp_path) == 0
    if broken == "damaged":
        (tmp_path / "model.safetensors").write_bytes(b"none")
    else:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", hidden_size=64)))
    assert check_model(tmp_path) == 1
    assert f"lightning-pack: error: {tmp_path}: the weights do not load (" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_wrong_usage(config_file: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert check_model(config_file, "--device", device) == 2
    assert f"--device {device}: " in capsys.readouterr().err
