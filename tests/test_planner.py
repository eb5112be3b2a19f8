"""The planner against figures written down by hand, real datasets and the real command line."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_pack import EnergonPackDataModule, PackingPolicy, cli, plan
from lightning_pack.bench.bins import drawn
from lightning_pack.binning import lower_bound, packers
from lightning_pack.planner import Combination, Plan, Sources, Stream
from lightning_pack.planner.combination import bound_of
from lightning_pack.policy import AUTO, OverlengthError
from lightning_pack.prepare import prepare_jsonl, train_tokenizer
from lightning_pack.simulation import simulate
from tests.numbers_data import NumberEncoder, records_of, write_webdataset
from tests.numbers_data import lengths as numbers_lengths

WORDS = ("packer", "fills", "every", "row", "and", "leaves", "no", "source", "behind", "while", "the", "reader", "goes", "on")


@pytest.fixture(scope="module")
def long_tailed() -> Plan:
    lengths, capacity = drawn("A", 9000)
    return plan(lengths, capacity=capacity, buffer_sizes=[256, 16, 64], ranks=8, multiple=16, sources=9000)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of 300 texts, with its tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=min(int(rng.lognormvariate(3, 1)) + 2, 300))) for _ in range(300)]
    train_tokenizer(lines, vocab_size=320).save_pretrained(folder / "tokenizer")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare_jsonl(
        folder / "texts.jsonl", folder / "data", tokenizer=folder / "tokenizer", val_fraction=0, shards=2, progress=False
    )
    return folder / "data"


def row(found: Plan, algorithm: str, size: int, *, carry_over: bool = True) -> Combination:
    (only,) = [
        each
        for each in found.combinations
        if (each.policy.algorithm, each.policy.buffer_size, each.policy.carry_over) == (algorithm, size, carry_over)
    ]
    return only


def refused(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return int(stop.value.code or 0)


def test_each_combination_is_what_a_worker_makes_of_the_lengths(long_tailed: Plan) -> None:
    assert len(long_tailed.combinations) == (len(packers()) + 1) * 3
    lengths, capacity = drawn("A", 9000)
    aligned = sum(-(-length // 16) * 16 for length in lengths)
    for each in long_tailed.combinations:
        if each.policy.buffer_size == 64:
            assert each.packs == simulate(each.policy, lengths).packs
        assert each.bound == lower_bound([-(-length // 16) * 16 for length in lengths], capacity) <= each.packs
        assert each.fill == pytest.approx(sum(lengths) / (each.packs * 4096))
        assert each.alignment == pytest.approx((aligned - sum(lengths)) / (each.packs * 4096))
        assert each.alignment > 0.01
        assert each.fill + each.alignment + each.tail == pytest.approx(1)
    flush, carry = (row(long_tailed, "best_fit_decreasing", 64, carry_over=over) for over in (False, True))
    assert flush.fill + 0.05 < carry.fill
    assert flush.oldest < 1 < carry.oldest < 6
    # Ids and labels of two buffers of 64 sources of mean length, 8 bytes each.
    assert carry.memory == pytest.approx(2 * 64 * 16 * sum(lengths) / 9000, abs=1)


def test_the_smallest_buffer_that_is_nearly_the_best_is_recommended(long_tailed: Plan) -> None:
    best = [max(row(long_tailed, name, size).fill for name in AUTO) for size in (16, 64, 256)]
    assert best[0] < best[2] - 0.002 < best[1], "neither the smallest nor the largest"
    policy = long_tailed.policy
    assert policy.buffer_size == 64
    lengths, _ = drawn("A", 9000)
    assert policy.algorithm == PackingPolicy(4096, buffer_size=64, multiple=16).settled(lengths).algorithm
    uniform, capacity = drawn("B", 9000)
    other = plan(uniform, capacity=capacity, buffer_sizes=[16, 256], sources=9000)
    assert (other.policy.algorithm, policy.algorithm) == ("minimum_bin_slack", "exact_fill")
    assert other.policy.algorithm == PackingPolicy(capacity, buffer_size=256).settled(uniform).algorithm
    assert other.policy.buffer_size == 256
    gain = max(row(other, name, 256).fill for name in AUTO) - max(row(other, name, 16).fill for name in AUTO)
    assert f"{100 * gain:.2f} points more than a smaller one" in other.recommendation.reason


def test_ranks_are_balanced_where_they_need_it(long_tailed: Plan) -> None:
    balance = long_tailed.balance
    assert balance is not None
    assert balance.unbalanced > 1.8
    assert balance.steps >= 256
    assert [(each.window, each.imbalance < most) for each, most in zip(balance.windows, (1.35, 1.25), strict=True)] == [
        (64, True),
        (128, True),
    ]
    assert long_tailed.policy.balance == "quadratic"
    chosen = long_tailed.recommendation.combination
    assert chosen.memory == row(long_tailed, chosen.policy.algorithm, 64).memory + 16 * (64 + 1) * 4096
    assert f"the busiest of 8 ranks has {balance.unbalanced:.2f} times" in long_tailed.recommendation.remarks[0]
    equal = plan([100] * 1000, capacity=400, ranks=4, sources=1000, buffer_sizes=[16])
    assert equal.balance is not None
    assert equal.balance.unbalanced == 1
    assert equal.policy.balance is None
    assert "needs no balance" in equal.recommendation.remarks[0]


@pytest.mark.parametrize(("overlength", "lost"), [("drop", 5000), ("truncate", 5 * (1000 - 512)), ("split", 0)])
def test_over_length(overlength: Any, lost: int) -> None:
    lengths = [100] * 95 + [1000] * 5
    found = plan(lengths, capacity=512, overlength=overlength, sources=100, buffer_sizes=[16])
    over = found.recommendation.combination.overlength
    assert (over.over, over.lost) == (0.05, pytest.approx(lost / 14_500))
    assert f"overlength='{overlength}' loses {lost / 14_500:.2%} of the tokens read" in found.report()
    # 1000 tokens and more are needed for less than 1 %, in steps of 64; 960 would still lose 5 x 40 of 14,500.
    said = [remark for remark in found.recommendation.remarks if "from capacity 1,024 on it would be at most 1%" in remark]
    assert len(said) == (lost > 0)
    packed = found.combinations[0]
    # Each dry run packs 100: without the long ones 5 come again, and pieces of 512 and 489 tokens share one.
    assert packed.real_tokens == {"drop": 10_000, "truncate": 9500 + 5 * 512, "split": 9500 + 3 * 1001}[overlength]
    capacities = {each.capacity: each for each in found.capacities}
    assert {capacity: each.packs_per_step for capacity, each in capacities.items()} == {256: 4, 512: 2, 1024: 1}
    at = capacities[1024]
    assert at.combination.overlength.lost == 0
    assert at.squares_per_token == pytest.approx((95 * 100**2 + 5 * 1000**2) / 14_500)
    assert at.sources_per_step == pytest.approx(100 / at.combination.packs)


def test_over_length_sources_that_would_stop_a_run_stop_the_plan() -> None:
    with pytest.raises(
        OverlengthError, match=r"5 of 100 sources of lengths are longer than capacity=512, the longest has 1,000"
    ):
        plan([100] * 95 + [1000] * 5, capacity=512, overlength="error")
    assert plan([100] * 95, capacity=512, overlength="error", sources=95, buffer_sizes=[16]).policy.overlength == "error"


def test_few_sources_are_repeated_in_new_orders() -> None:
    lengths = list(range(1, 51))
    stream = Sources.given(lengths, most=1000).stream(PackingPolicy(64), count=130)
    assert stream.lengths[:50] == lengths
    assert stream.lengths[50:100] != lengths
    assert sorted(stream.lengths[50:100]) == lengths
    assert len(stream.lengths) == 130
    found = plan(lengths, capacity=64, sources=130, buffer_sizes=[16])
    assert "all 50 sources; each dry run packs 130, repeated in new orders" in found.report()
    assert (
        "there are only 50 sources, fewer than the 256"
        in plan(lengths, capacity=64, sources=130, buffer_sizes=[16], workers=4, ranks=4).recommendation.remarks[-1]
    )


def test_sources_of_different_groups_do_not_share_packs() -> None:
    lengths, keys = [6, 4] * 20, ["a", "b"] * 20
    stream = Stream(lengths=lengths, keys=keys, overlength=Sources.given(lengths, most=40).overlength(PackingPolicy(10)))
    policy = PackingPolicy(10, algorithm="exact_fill", buffer_size=16)
    apart = Combination.measured(policy, stream, bound=bound_of(policy, stream))
    together = Combination.measured(policy, replace(stream, keys=[None] * 40), bound=20)
    # 20 sixes alone, and two fours to a pack; the bound knows of the fours only that they have 80 tokens.
    assert (apart.packs, apart.bound, together.packs) == (30, 20 + 8, 20)


def test_a_dataset_is_read_as_for_training(numbers: Path, tmp_path: Path) -> None:
    found = plan(numbers, capacity=64, encoder=NumberEncoder(), buffer_sizes=[16, 32], sources=400)
    reasons = {gone.reason: gone.sources for gone in found.sources.left_out}
    assert reasons == {"corrupt": 3, "empty": 1, "encoder_error": 1, "no_targets": 1}
    assert len(found.sources.lengths) == 200 - 6
    assert max(found.sources.lengths) == 500, "sources are measured whole"
    assert found.sources.whole
    assert "left out at any capacity: corrupt 3, empty 1, encoder_error 1, no_targets 1" in str(found)
    again = plan(numbers, capacity=64, encoder=NumberEncoder(), buffer_sizes=[16, 32], sources=400)
    assert again == found
    few = plan(numbers, capacity=64, encoder=NumberEncoder(), buffer_sizes=[16], sources=50)
    assert not few.sources.whole
    assert "the first" in str(few)
    # A blend by weights has no end.
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - weight: 1\n        path: {numbers}\n"
    )
    endless = plan(blend, capacity=64, encoder=NumberEncoder(), buffer_sizes=[16], sources=400)
    assert not endless.sources.whole
    assert len(endless.sources.lengths) + sum(gone.sources for gone in endless.sources.left_out) == 400


def test_the_loader_makes_the_packs_that_were_planned(tmp_path: Path) -> None:
    path = write_webdataset(tmp_path / "data", {"train": records_of(numbers_lengths(120, most=60))})
    found = plan(path, capacity=64, encoder=NumberEncoder(), buffer_sizes=[16], sources=120)
    assert found.sources.lengths != tuple(numbers_lengths(120, most=60)), "read in a shuffled order"
    for each in (row(found, name, 16) for name in ("exact_fill", "concatenative")):
        data = EnergonPackDataModule(path, encoder=NumberEncoder(), packing=each.policy, num_workers=0, epochs=1)
        data.setup("fit")
        batches = list(data.train_dataloader())
        data.teardown("fit")
        assert len(batches) == each.packs > 20
        assert max(age for batch in batches for age in batch.ages) / 16 == each.oldest
    assert row(found, "exact_fill", 16).packs < row(found, "concatenative", 16).packs


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command_writes_what_fit_understands(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_pack.lightning_cli import read_config

    out = tmp_path / "plan"
    cli.main(
        [
            *("plan", str(texts), "--capacity", "512", "--ranks", "4", "--multiple", "4", "--workers", "1"),
            *("--buffer-sizes", "16", "64", "--sources", "1500", "--overlength", "truncate", "--out", str(out)),
        ]
    )
    printed = capsys.readouterr().out
    for words in (
        f"{texts}: all 300 sources; each dry run packs 1,500",
        "best_fit_decreasing, flushed",
        "Capacities at equal token slots",
        "Attention work of 4 ranks",
        "Recommended: algorithm=",
        "The loader of a rank then holds about",
    ):
        assert words in printed
    (marked,) = [line for line in printed.split("Capacities")[0].splitlines() if line.startswith("*")]
    block = (out / "plan.yaml").read_text()
    assert block in printed
    settings = yaml.safe_load(block)["data"]["packing"]
    assert marked.split()[1:3] == [settings["algorithm"], str(settings["buffer_size"])]

    (tmp_path / "fit.yaml").write_text(
        yaml.safe_dump({"model": {"model": "nowhere"}, "data": {"path": str(texts), "packing": {"capacity": 64}}})
    )
    datamodule, _ = read_config(str(tmp_path / "fit.yaml"), ["--config", str(out / "plan.yaml")])
    assert datamodule.packing == PackingPolicy(**settings)
    assert (datamodule.packing.capacity, datamodule.packing.multiple, datamodule.packing.overlength) == (512, 4, "truncate")
    assert datamodule.packing.algorithm in AUTO

    document = json.loads((out / "plan.json").read_text())
    assert document["recommendation"]["packing"] == settings
    assert len(document["combinations"]) == (len(packers()) + 1) * 2
    (same,) = [
        each
        for each in document["combinations"]
        if (each["algorithm"], each["buffer_size"], each["carry_over"])
        == (*map(settings.get, ("algorithm", "buffer_size")), True)
    ]
    assert same["fill"] == document["recommendation"]["fill"] > 0.8
    assert document["balance"]["ranks"] == 4
    picture = (out / "plan.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    assert width > 2 * height > 400


def test_a_notebook_shows_tables_and_a_figure(long_tailed: Plan) -> None:
    import matplotlib
    from matplotlib import pyplot

    settings = dict(matplotlib.rcParams)
    figure = long_tailed.figure()
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == (settings, [])
    # A notebook shows it, whether or not pyplot was imported.
    picture = figure._repr_png_()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    figure.set_dpi(figure.dpi / 2)
    assert len(figure._repr_png_()) < 0.7 * len(picture)
    lengths, fill = figure.axes
    counted = sum(bar.get_height() for bar in lengths.patches)
    assert counted == 9000
    assert lengths.lines[0].get_xdata()[0] == 4096
    drawn_lines = {line.get_label(): line.get_ydata() for line in fill.lines}
    assert len(drawn_lines) == len(packers()) + 2
    expected = [100 * row(long_tailed, "best_fit_decreasing", size, carry_over=False).fill for size in (16, 64, 256)]
    assert np.allclose(drawn_lines["best_fit_decreasing, flushed"], expected)
    html = long_tailed._repr_html_()
    assert html.count("<table ") == 2
    assert html.count("font-weight: bold") == 2
    assert f"{long_tailed.recommendation.combination.fill:.2%}" in html
    assert "buffer_size: 64" in html


def test_without_matplotlib_only_the_picture_is_missing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "matplotlib" or name.endswith("planner.notebook_figure")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    args = ["plan", str(texts), "--capacity", "512", "--buffer-sizes", "16", "--sources", "300"]
    cli.main(args)
    assert "Recommended" in capsys.readouterr().out
    assert refused(*args, "--out", str(tmp_path / "out")) == 1
    shown = capsys.readouterr()
    assert "Recommended" in shown.out
    assert "the picture of a plan needs matplotlib: pip install 'lightning-pack[plot]'" in shown.err
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"plan.json", "plan.yaml"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 100, "multiple": 8}, "capacity=100 is not a multiple of multiple=8: take 96"),
        ({"capacities": [12], "multiple": 8}, "capacity=12 is not a multiple of multiple=8"),
        ({"buffer_sizes": []}, "buffer_sizes is empty: give at least one number of sources"),
        ({"buffer_sizes": [16, 0]}, "buffer_sizes=0: a whole number of at least 1 is needed"),
        ({"buffer_sizes": [16, 16]}, r"buffer_sizes=\[16, 16\] has a size twice"),
        ({"ranks": 0}, "ranks=0: a whole number of at least 1"),
        ({"workers": 1.5}, "workers=1.5: a whole number of at least 1"),
        ({"sources": 0}, "sources=0: a whole number of at least 1"),
        ({"tokenizer": "t"}, "tokenizer='t' is not used with lengths"),
        ({"source": []}, "there are no lengths to plan with"),
        ({"source": [5, 0]}, r"lengths\[1\] is 0: a source has a whole number of tokens"),
        ({"source": [5, 2.5]}, r"lengths\[1\] is 2.5: a source has a whole number of tokens"),
        ({"source": [70, 90]}, r"none of the 2 sources of lengths fits into capacity=64 \(the shortest has 70 tokens\)"),
        ({"source": "/nowhere/at/all"}, "there is no dataset at '/nowhere/at/all'"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], message: str) -> None:
    settings = {"source": [5, 6], "capacity": 64} | options
    with pytest.raises(ValueError, match=message):
        plan(settings.pop("source"), **settings)


def test_a_dataset_without_usable_sources_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"n": 9, "id": 1, "no_targets": True}] * 3 + [{"refuse": "corrupt"}] * 4
    path = write_webdataset(tmp_path / "useless", {"train": [*records]}, shards=1)
    with pytest.raises(
        ValueError, match=r"none of the 7 sources read from .*useless' can be trained on \(corrupt 4, no_targets 3\)"
    ):
        plan(path, capacity=64, encoder=NumberEncoder())
    good = write_webdataset(tmp_path / "good", {"train": records_of([5] * 9)}, shards=1)
    assert refused("plan", str(good), "--capacity", "64") == 1
    assert "tokenizer" in capsys.readouterr().err
    assert refused("plan", str(good)) == 2
    assert "--capacity" in capsys.readouterr().err
