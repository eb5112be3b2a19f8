"""Reads prepared datasets back: through Energon, and file by file."""

import hashlib
import json
import tarfile
import warnings
from dataclasses import dataclass

from megatron.energon import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)


@dataclass
class Record(Sample):
    record: dict


@stateless
def cook(sample: CrudeSample) -> Record:
    return Record(**basic_sample_keys(sample), record=sample["json"])


class Whole(DefaultTaskEncoder):
    cookers = [Cooker(cook=cook)]  # noqa: RUF012

    def batch(self, samples):
        return samples


def read_back(path, split, *, workers=0):
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    common = {"worker_config": config, "batch_size": 1, "task_encoder": Whole()}
    if split == "train":
        dataset = get_train_dataset(
            path, **common, shuffle_buffer_size=None, max_samples_per_sequence=100, repeat=False, virtual_epoch_length=0
        )
    else:
        dataset = get_val_dataset(path, **common, split_part=split)
    with warnings.catch_warnings():
        # Energon's loader asks for pinned memory, which a machine without an accelerator does not have.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")
        return [sample for batch in get_loader(dataset) for sample in batch]


def members(path, split):
    found = {}
    for shard in sorted(path.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            keys = [name.removesuffix(".json") for name in tar.getnames()]
            assert keys == sorted(keys)
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                found[member.name] = json.load(tar.extractfile(member))
    return found


def digests(path, *, patterns=("*.tar", "tokenizer/*", ".nv-meta/split.yaml", ".nv-meta/index.uuid", "lightning_pack.json")):
    files = [file for pattern in patterns for file in path.glob(pattern)]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
