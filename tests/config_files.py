"""Commands that the first lines of each configuration tell, and a folder in which they run as they stand."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_pack import cli
from lightning_pack.prepare import prepare_jsonl
from tests.tiny_models import tiny_model
from tests.tiny_vision import VOCABULARY, image_processor, picture, vision_model, vision_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
#: What makes a run a small one, on a machine without a GPU. All else stays as the file says, bfloat16 included.
SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.limit_val_batches": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "model.warmup_steps": 1,
    "data.num_workers": 0,
}
#: The same for files that ask for rows of their own width, and for several rows to a step.
NARROW = {
    "data.packing.capacity": 256,
    "data.shuffle_buffer_size": 8,
    "trainer.accumulate_grad_batches": 2,
    "trainer.val_check_interval": 2,
}
#: Of the last callback, which keeps the newest checkpoint.
EVERY_STEP = {"trainer.callbacks.init_args.every_n_train_steps": 1}


def commands(name: str) -> list[list[str]]:
    """Arguments of each ``lightning-pack`` command in the first lines of a configuration, without the program's name."""
    beginning = (CONFIGS / name).read_text().partition("\n\n")[0]
    lines = [line.removeprefix("#").strip() for line in beginning.splitlines() if line.startswith("#   ")]
    every = [shlex.split(line) for line in "\n".join(lines).replace("\\\n", "").splitlines()]
    return [words[1:] for words in every if words[0] == "lightning-pack"]


def options(*several: dict[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    merged = {name: value for settings in several for name, value in settings.items()}
    return [word for name, value in merged.items() for word in (f"--{name}", json.dumps(value).strip('"'))]


def furnish(folder: Path, *, images: bool = False) -> None:
    """Put into ``folder`` what its user has: the configurations, a model at ``path/to/model``, and files of chats and texts."""
    (folder / "configs").symlink_to(CONFIGS)
    model = folder / "path" / "to" / "model"
    tokenizer = vision_tokenizer()
    tokenizer.save_pretrained(model)
    answers = ["It shows a cat and a horse. " * (1 + i % 5) for i in range(60)]
    question: list[Any] = [f"What is in picture {i}?" for i in range(len(answers))]
    if images:
        image_processor("qwen3_vl").save_pretrained(model)
        vision_model("qwen3_vl").save_pretrained(model)
        for i in range(0, len(answers), 2):
            (folder / f"{i}.png").write_bytes(picture(i))
            question[i] = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": question[i]}]
    else:
        tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=512).save_pretrained(model)
    pairs = zip(question, answers, strict=True)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    texts = [answer * (40 if i % 20 == 7 else 1) for i, answer in enumerate(answers)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def furnish_rows(folder: Path) -> None:
    """Put into ``folder`` the dataset that the quickstart would make, with less in it."""
    furnish(folder)
    prepare_jsonl(folder / "chats.jsonl", folder / "data" / "stdlib", tokenizer=folder / "path/to/model", progress=False)


def run_on_this_rank(argument: dict[str, Any]) -> None:
    """Run commands in a folder, as a rank of several."""
    os.chdir(argument["folder"])
    runs: Sequence[list[str]] = argument["runs"]
    for run in runs:
        cli.main(run)
