"""Causal language models of transformers from a local folder or from a configuration; nothing is downloaded."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

#: Names inside parts of published configurations, and under which transformers reads the same.
_READ_AS = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
#: What such parts hold for generation, which training does not use.
_OF_GENERATION = {"bos_token_id", "eos_token_id"}


def load_causal_lm(source: str | dict[str, Any], *, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with weights of ``dtype``; with its vision encoder, where it has one.

    Args:
        source: a local folder that ``save_pretrained`` wrote, or a configuration as a dict with ``model_type``; its weights are
            then drawn from torch's global generator, as transformers does.
        dtype: of the weights.

    Raises:
        ValueError: for a folder that is none, an unknown ``model_type``, and fields that the model does not have.
    """
    if isinstance(source, dict):
        config = _config(source)
        return _auto_class(type(config)).from_config(config, dtype=dtype)
    if not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"model={source!r} is not a local folder with a config.json, and nothing is downloaded: save a model there with "
            "save_pretrained, or give a configuration as a dict with model_type"
        )
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    return _auto_class(type(config)).from_pretrained(source, dtype=dtype, local_files_only=True)


def _auto_class(config: type) -> Any:
    """For vision-language models that are no plain causal ones, the class that takes images."""
    if config not in AutoModelForCausalLM._model_mapping and config in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let ``model`` recompute its activations in the backward pass; boundaries are handed on unchanged."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _config(source: dict[str, Any]) -> Any:
    values = dict(source)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={model_type!r} of the model's configuration is not known to transformers: give a dict with "
            "model_type, such as {'model_type': 'llama', 'hidden_size': 256, ...}"
        )
    unknown = sorted(_unknown_names(CONFIG_MAPPING[model_type], values))
    if unknown:
        raise ValueError(f"the configuration of {model_type!r} has no {', '.join(unknown)}: correct or remove it")
    try:
        return AutoConfig.for_model(model_type, **values)
    except StrictDataclassError as error:
        raise ValueError(
            f"transformers refuses the configuration of {model_type!r}: {' '.join(str(error).split())}: correct it"
        ) from error


def _unknown_names(kind: type, values: dict[str, Any]) -> Iterator[str]:
    # transformers keeps whatever it is given, so a misspelt size would silently keep its default. Some models read fields that
    # their configuration does not declare, so the code of the model has a say.
    model = _auto_class(kind)._model_mapping.get(kind, None)
    code = inspect.getsource(sys.modules[model.__module__]) if isinstance(model, type) else ""
    yield from _unknown_to(kind, values, code)


def _unknown_to(
    kind: Any, values: dict[str, Any], code: str, part: str = "", whole: dict[str, Any] | None = None
) -> Iterator[str]:
    default = kind()
    # Before it is asked for attributes: of one that differs between layers a configuration raises an error of its own.
    known = set(default.to_dict())
    if hasattr(default, "rope_parameters"):
        known |= {"rope_theta", "rope_scaling"}
    for name, value in values.items():
        inner = getattr(kind, "sub_configs", {}).get(name)
        if isinstance(inner, type) and inner is not AutoConfig and isinstance(value, dict):
            # Those of the encoder or decoder inside, which may be told what they are.
            own = {field: given for field, given in value.items() if field != "model_type"}
            yield from _unknown_to(inner, own, code, f"{part}{name}.", values if whole is None else whole)
        elif name in known or hasattr(default, name) or re.search(rf"config\.{name}\b|config, \"{name}\"", code):
            continue
        elif whole is None or not _told_otherwise(name, value, {**default.to_dict(), **values}, whole):
            yield part + name


def _told_otherwise(name: str, value: Any, part: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether a part holds what published configurations repeat in it, though it is read under another name or elsewhere."""
    if (read := _READ_AS.get(name)) is not None:
        return bool(part.get(read) == value)
    return name in _OF_GENERATION or (name in whole and whole[name] == value)
