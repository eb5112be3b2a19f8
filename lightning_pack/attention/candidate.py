"""A model that is to be checked, as it lies on a disk: a configuration, with or without weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

#: Of vision-language models the text part is what packed rows go through.
_AUTO: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, eq=False)
class Candidate:
    """Configuration of a causal language model of transformers, and where its weights are."""

    #: The configuration file.
    file: Path
    config: Any
    #: The class of transformers that makes the model.
    auto: Any
    #: Folder of the weights; None if there are none.
    weights: Path | None

    @classmethod
    def at(cls, path: Path) -> Candidate:
        """What lies at ``path``: a folder with a config.json, or a configuration file.

        Raises:
            ValueError: if that is no causal language model which transformers has code for, or its fields do not fit together.
        """
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"{path} is neither a folder with a config.json nor a configuration file, and nothing is downloaded: give the "
                "path of a model on this machine (save_pretrained writes one)"
            )
        values = _read(file)
        model_type = values.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"{file}: model_type={model_type!r} is not known to this version of transformers (code that comes with a model "
                "is not run): give the configuration of a model that transformers has"
            )
        try:
            config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        # Each kind of configuration checks its fields in its own way.
        except Exception as error:
            raise ValueError(
                f"{file}: transformers makes no configuration of it ({_said(error)}): correct that field"
            ) from error
        auto = next((auto for auto in _AUTO if type(config) in auto._model_mapping), None)
        if auto is None:
            raise ValueError(f"{file}: {model_type!r} is no causal language model, and packed rows are for those only")
        weighty = path.is_dir() and any(True for pattern in _WEIGHTS for _ in path.glob(pattern))
        return cls(file=file, config=config, auto=auto, weights=path if weighty else None)

    def empty(self) -> PreTrainedModel:
        """The model without memory for its weights, good for inspection.

        Raises:
            ValueError: if transformers cannot build it.
        """
        try:
            with torch.device("meta"):
                return self.auto.from_config(self.config)
        except Exception as error:
            raise ValueError(
                f"{self.file}: transformers builds no model of it ({_said(error)}): correct the configuration"
            ) from error

    def load(self, *, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, list[str]]:
        """The model, and names of the weights that were drawn at random because the folder lacks them.

        Without any weights all are drawn (and none is named). Torch's global generator is left alone.

        Raises:
            ValueError: if the memory of this machine cannot hold the weights, or they are damaged or of another model.
        """
        needed = sum(parameter.numel() for parameter in self.empty().parameters()) * dtype.itemsize
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise ValueError(
                f"{self.file}: the weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} and this machine "
                f"has {memory / 1e9:.1f} GB: give --dtype bfloat16, or a copy of the configuration with fewer layers, which "
                "answers the question as well"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.weights is None:
                return self.auto.from_config(self.config, dtype=dtype), []
            try:
                model, info = self.auto.from_pretrained(
                    str(self.weights), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
                )
            # What is raised depends on the format of the files.
            except Exception as error:
                raise ValueError(
                    f"{self.weights}: the weights do not load ({_said(error)}): save the model again, or give its config.json "
                    "alone, which answers the question as well"
                ) from error
            return model, sorted(info["missing_keys"])


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): give the config.json of a model") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{file} holds a {type(values).__name__} and not the fields of a model: give the config.json of a model"
        )
    return values
