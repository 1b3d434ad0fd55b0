"""The store under load, small: 100,000 records were written by the same code, see results/bench/store.json."""

from pathlib import Path

import pytest

from mixassay.runners import bench_store


def test_killed_at_random_no_acknowledged_record_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_store, "PAUSE", (0.3, 0.6))
    found = bench_store.run(tmp_path, total=1500, writers=3)
    assert found["kills"] > 0
    assert found["acknowledged"] == 1500
    assert (found["lost"], found["wrong"], found["warnings"]) == (0, 0, 0)
    assert found["written_twice"] <= found["kills"], "at most the one that was being acknowledged"
    wall, core = bench_store.report(tmp_path)
    assert min(wall, core) > 0
