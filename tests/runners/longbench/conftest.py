"""Data that the repository does not hold: published predictions and sample rows of LongBench."""

import os
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("MIXASSAY_DATA") or Path(__file__).parents[4] / "shared/data") / "longbench"


@pytest.fixture
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"no LongBench data at {DATA}; set MIXASSAY_DATA to the folder that holds longbench/")
    return DATA


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`datasets`, with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets
