"""Transformers' own search for packed sources, left out where boundaries say it all.

Before it describes a mask, transformers looks whether positions restart, and reads the answer from the device: one wait for
each kind of layer in every forward. Under an attention that refuses rows without boundaries the answer has no use.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import masking_utils

#: The arguments as far as they are used here. Where a version has others, its search stays on, which costs a wait.
_ARGUMENTS = ["config", "inputs_embeds", "attention_mask", "cache", "position_ids"]
_SKIPPED = "_packed_detection_skipped_for"


def skip_detection(attention: str) -> bool:
    """Let transformers search no positions for models whose attention implementation is ``attention``; once is enough.

    Models under every other implementation are searched as before.

    Returns:
        Whether the installed version of transformers lets it be skipped.
    """
    original: Any = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if attention in getattr(original, _SKIPPED, ()):
        return True
    if original is None or list(inspect.signature(original).parameters)[: len(_ARGUMENTS)] != _ARGUMENTS:
        return False

    def preprocess(
        config: Any, inputs_embeds: Any, attention_mask: Any, cache: Any, position_ids: Any, *rest: Any, **named: Any
    ) -> Any:
        if config._attn_implementation == attention:
            position_ids = None
        return original(config, inputs_embeds, attention_mask, cache, position_ids, *rest, **named)

    setattr(preprocess, _SKIPPED, (*getattr(original, _SKIPPED, ()), attention))
    masking_utils._preprocess_mask_arguments = preprocess
    return True
