"""Lightning callbacks of packed training."""

from lightning_pack.callbacks.attention import PackedAttention
from lightning_pack.callbacks.monitor import PackingMonitor
from lightning_pack.callbacks.token_normalization import TokenNormalizedGradients

__all__ = ["PackedAttention", "PackingMonitor", "TokenNormalizedGradients"]
