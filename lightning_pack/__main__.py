"""``python -m lightning_pack`` is the ``lightning-pack`` command."""

from lightning_pack.cli import main

if __name__ == "__main__":
    main()
