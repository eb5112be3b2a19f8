"""Packed attention switched on in a model, and everything put back afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from lightning_pack.attention.backends import Backend
from lightning_pack.attention.inspection import ModelRefusedError, require_packable
from lightning_pack.attention.positions import learned_positions
from lightning_pack.attention.registration import BACKEND_ATTRIBUTE, CHECKED_ATTRIBUTE, STRICT_ATTENTION, register


@dataclass(frozen=True, eq=False)
class ActivatedModel:
    """A model that runs packed rows, and what was set in it before."""

    model: PreTrainedModel
    #: Attention implementation that its text part runs, by name.
    packed: str
    #: Attention implementation of the text part before.
    attention: str
    #: Each configuration that asks for a KV cache, and what it said.
    caches: tuple[tuple[Any, bool | None], ...]
    #: What computes attention; None for segments one by one.
    backend: Backend | None = None
    #: Tokens of the longest source that it has learned positions for; None where positions are computed.
    positions: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, attention: str = STRICT_ATTENTION, backend: Backend | None = None) -> ActivatedModel:
        """Check ``model``, set its text part to ``attention`` computed by ``backend`` and switch the KV cache off.

        Without a backend, segments are computed one by one, which every device can. Vision and audio parts keep their
        implementation: their sources are told apart by their own boundaries.

        Raises:
            ModelRefusedError: if packed rows are not safe with the model.
        """
        require_packable(model, backend=backend)
        register()
        text = model.config.get_text_config()
        activated = cls(
            model=model,
            packed=attention,
            attention=text._attn_implementation,
            # A composite configuration does not pass use_cache on to its text part, nor the other way round.
            caches=tuple(
                (config, config.use_cache) for config in _distinct(model.config, text) if hasattr(config, "use_cache")
            ),
            backend=backend,
            positions=learned_positions(model),
        )
        set_attention(model, attention)
        if backend is not None:
            # On the layers, because that is all that an attention function is given. No part of the state of the model.
            for module in model.modules():
                setattr(module, BACKEND_ATTRIBUTE, backend)
        for config, _ in activated.caches:
            config.use_cache = False
        return activated

    def require_active(self) -> None:
        """Refuse a model whose attention was set to something else since.

        Raises:
            ModelRefusedError: naming that.
        """
        now = self.model.config.get_text_config()._attn_implementation
        if now != self.packed:
            raise ModelRefusedError(
                f"the attention of {type(self.model).__name__} was set to {now!r} during the run, under which nothing keeps "
                f"the sources of a packed row apart: set {self.packed!r} again before the next batch (after you have "
                "generated text, for instance), or leave it alone"
            )

    def restore(self) -> None:
        """Put back attention and KV cache as they were."""
        set_attention(self.model, self.attention)
        for module in self.model.modules():
            for name in (BACKEND_ATTRIBUTE, CHECKED_ATTRIBUTE):
                module.__dict__.pop(name, None)
        for config, use_cache in self.caches:
            config.use_cache = use_cache


def _distinct(*configs: Any) -> list[Any]:
    return list({id(config): config for config in configs}.values())


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Set the attention implementation of the text part of ``model``."""
    config = model.config
    text = config.get_text_config()
    if text is config:
        model.set_attn_implementation(attention)
        return
    name = next(name for name in config.sub_configs if getattr(config, name) is text)
    model.set_attn_implementation({name: attention})
