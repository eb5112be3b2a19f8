"""Checkpoints as they lie on disk: whether they can be read, what they hold, and whether a run could go on from them."""
