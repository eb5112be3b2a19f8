"""What only a CUDA device shows: ``pytest -m gpu`` for the checks, ``python -m tests.gpu`` for one table of figures.

The logic takes device and dtype as arguments: ``LIGHTNING_PACK_TEST_DEVICE=cpu pytest tests/gpu`` runs all of it that a CPU
can.
"""
