"""Low-rank adapters (LoRA): a frozen model with small trained matrices beside its linear layers."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_pack.callbacks.media_parameters import media_parameters
from lightning_pack.resume import different_settings, plain_settings

#: Entry of a checkpoint without the frozen weights: what they were.
BASE = "lightning_pack_frozen_weights"
#: And the configuration of their model, which decides what weights that are equal compute.
CONFIGURATION = "lightning_pack_frozen_configuration"
#: Settings that change nothing of that, where they stand in a configuration or in a part of it.
_NOTES = frozenset(
    {
        *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id", "problem_type"),
        *("output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "transformers_version", "use_cache"),
    }
)
#: Values of each frozen weight that are compared.
_SAMPLED = 256


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters of :class:`~lightning_pack.PackedCausalLM`; needs ``pip install 'lightning-pack[lora]'``.

    Args:
        rank: inner width of an adapter.
        alpha: adapters are added with weight ``alpha / rank``.
        dropout: share of an adapter's inputs that are dropped in training.
        target_modules: last part of the names of the linear layers that get an adapter, such as ``("q_proj", "v_proj")``;
            ``"all-linear"`` means all but the output embeddings.
        vision: whether layers of a vision encoder get adapters too.
        adapters_only: leave the frozen weights out of checkpoints. They are made again where training goes on, and must be what
            they were.

    Raises:
        ValueError: for values out of range.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    vision: bool = False
    adapters_only: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora.rank={self.rank!r}: a whole number of at least 1 is needed")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise ValueError(f"lora.alpha={self.alpha!r}: a number above 0 is needed")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout!r}: a share of at least 0 and less than 1 is needed")
        for name in ("vision", "adapters_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"lora.{name}={getattr(self, name)!r} is not True or False")
        if isinstance(self.target_modules, str):
            if self.target_modules != "all-linear":
                raise ValueError(
                    f"lora.target_modules={self.target_modules!r} is not 'all-linear': give a list of names, such as "
                    f"[{self.target_modules}]"
                )
        else:
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
            if not self.target_modules:
                raise ValueError("lora.target_modules is empty: name the layers that get an adapter, or leave it out")

    @classmethod
    def of(cls, given: LoraOptions | Mapping[str, Any] | None) -> LoraOptions | None:
        """Options that may come as plain values, as from a checkpoint."""
        return given if given is None or isinstance(given, cls) else cls(**dict(given))  # type: ignore[arg-type]

    def plain(self) -> dict[str, Any]:
        """The same as plain values."""
        names = self.target_modules
        return asdict(self) | {"target_modules": names if isinstance(names, str) else list(names)}


def add_adapters(model: PreTrainedModel, options: LoraOptions) -> None:
    """Freeze ``model`` and put adapters into it, in place; their first values come from torch's global generator.

    Raises:
        ValueError: without the package peft, and for names that no linear layer has.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need the package peft: pip install 'lightning-pack[lora]', or set lora to null")
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=options.dropout,
        target_modules=_targets(model, options),
    )
    inject_adapter_in_model(config, model)


def _targets(model: PreTrainedModel, options: LoraOptions) -> list[str]:
    """Full names of the layers that get an adapter."""
    seeing = {id(parameter) for parameter in media_parameters(model)}
    if options.vision and not seeing:
        raise ValueError(f"lora.vision=True: {type(model).__name__} has no vision encoder; leave it out")
    head = model.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head and (options.vision or id(layer.weight) not in seeing)
    }
    ends = {name.rpartition(".")[2] for name in layers}
    wanted = ends if isinstance(options.target_modules, str) else set(options.target_modules)
    if missing := sorted(wanted - ends) or not wanted:
        raise ValueError(
            f"lora.target_modules={options.target_modules!r}: {type(model).__name__} has no linear layers named "
            f"{', '.join(missing) if isinstance(missing, list) else 'so'}; it has {', '.join(sorted(ends)) or 'none'}"
            + ("" if options.vision or not seeing else " (lora.vision=True takes those of its vision encoder too)")
        )
    return [name for name in layers if name.rpartition(".")[2] in wanted]


def refuse_other_adapters(checkpoint: Mapping[str, Any], options: LoraOptions | None) -> None:
    """Check that a checkpoint is one of the same adapters.

    Raises:
        ValueError: naming the settings that differ, with both values.
    """
    settings = checkpoint.get("hyper_parameters", {})
    if "lora" not in settings:
        # Of another module, whose weights say themselves whether they fit.
        return
    saved, now = LoraOptions.of(settings["lora"]), options
    if saved is None or now is None:
        if saved is now:
            return
        raise ValueError(
            f"the checkpoint was saved with lora={'null' if saved is None else saved.plain()}, and lora is "
            f"{'null' if now is None else now.plain()} now: a run goes on with the weights that it had, so set it back"
        )
    # Dropout, and what is saved, may change.
    changed = [name for name in ("rank", "alpha", "target_modules", "vision") if getattr(saved, name) != getattr(now, name)]
    if changed:
        both = ", ".join(
            f"lora.{name}={getattr(saved, name)!r} in the checkpoint, {getattr(now, name)!r} now" for name in changed
        )
        raise ValueError(f"the adapters of the checkpoint are others: {both}; set them back, or begin a new run")


def leave_out_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Keep only trained weights in the ``state_dict`` of a checkpoint, and say what the others are."""
    frozen = _frozen(module)
    checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name not in frozen}
    checkpoint[BASE] = frozen_weights(module)
    checkpoint[CONFIGURATION] = _configuration(module)


def put_in_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Complete a checkpoint of :func:`leave_out_frozen` with the frozen weights of ``module``.

    Raises:
        ValueError: if these are others than those that the adapters were trained with, or their model has another
            configuration, naming the settings that differ.
    """
    # Before the weights: where both differ, this says why. Checkpoints of releases that did not note it have none.
    if CONFIGURATION in checkpoint and (
        changed := different_settings(plain_settings(checkpoint[CONFIGURATION]), _configuration(module))
    ):
        raise ValueError(
            "the checkpoint holds adapters alone (lora.adapters_only), and they were trained beside a model of another "
            "configuration:\n" + "\n".join(changed) + "\nSet it back, or begin a new run"
        )
    if frozen_weights(module) != checkpoint[BASE]:
        raise ValueError(
            "the checkpoint holds adapters alone (lora.adapters_only), and they were trained with other frozen weights than "
            "those of this model: give the same folder as model, or for a model that is drawn from a configuration the same "
            "seed (seed_everything) and dtype"
        )
    checkpoint["state_dict"] = {**_frozen(module), **checkpoint["state_dict"]}


@torch.no_grad()
def frozen_weights(module: nn.Module) -> str:
    """Differs where frozen weights do: their names, types, shapes and some values of each, spread evenly."""
    hasher = hashlib.sha256()
    for name, parameter in _frozen(module).items():
        values = parameter.detach().reshape(-1)
        places = torch.linspace(0, max(len(values) - 1, 0), min(len(values), _SAMPLED), dtype=torch.float64).long()
        sampled = values[places.to(values.device)].cpu().contiguous()
        hasher.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        hasher.update(sampled.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _configuration(module: nn.Module) -> dict[str, Any]:
    """The settings of the model in a module, flat, as plain values."""
    (config, *_) = (part.config for part in module.modules() if isinstance(part, PreTrainedModel))
    return plain_settings(_without_notes(config.to_dict()))


def _without_notes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_notes(part) for name, part in value.items() if name not in _NOTES}
    if isinstance(value, list | tuple):
        return [_without_notes(part) for part in value]
    return value


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    # Tied weights under all of their names, as in a state_dict.
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}
