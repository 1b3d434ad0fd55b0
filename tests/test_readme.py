"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest

from mixassay.check import check
from mixassay.runners import train
from mixassay.sweep import Sweep

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(kind: str, holding: str) -> str:
    found = [text for text in re.findall(rf"```{kind}\n(.*?)```", README, re.S) if holding in text]
    assert len(found) == 1
    return found[0]


def test_the_sweep_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block("yaml", "version: 1"))
    sweep = Sweep.load(tmp_path / "mine.yaml")
    check(sweep)
    assert len(sweep.cells()) == 10  # 3 mixers, 2 widths, 2 sizes, less one mixer at one width
    assert [spec.seed for spec in sweep.reported(sweep.cells()[0], {"train.lr": 1e-3})] == [0, 1, 2, 3, 4]


def test_the_mixer_trains_and_its_state_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ema.py").write_text(block("python", "class EMA"))
    Path("mine.yaml").write_text(
        "version: 1\nname: mine\nplugins: [ema.py]\ntask: {name: mqar, vocab_size: 32, seq_len: 16, num_kv: 2}\n"
        "model: {d_model: 8}\ntrain: {steps: 20, batch_size: 8}\nmixer: {name: ema, decay: 0.5}\nseeds: [0, 1]\n"
    )
    sweep = Sweep.load("mine.yaml")
    check(sweep)
    outcomes = list(train.run(sweep.reported(sweep.cells()[0], {})))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert outcomes[0].state_bytes == {"16": 2 * 8 * 4}  # two layers of 8 channels in float32
