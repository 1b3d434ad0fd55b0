"""A sweep on a Ray cluster of two nodes, one of which is lost on the way."""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners.store import Store

from .test_launch import LONG, checkpoints, shards, wait_for

ray = pytest.importorskip("ray", reason="needs the extra `ray`")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without CPUs, so that whatever runs is on one of two nodes with one CPU each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    Cluster = importlib.import_module("ray.cluster_utils").Cluster
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    cluster.first, cluster.second = (cluster.add_node(num_cpus=1, **small) for _ in range(2))
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def workers(node: Any) -> list[int]:
    """Our worker processes on one of the cluster's nodes, which are all on this machine."""
    raylet = f"RAY_RAYLET_PID={node.all_processes['raylet'][0].process.pid}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"mixassay.runners.worker" in (process / "cmdline").read_bytes():
                found += [int(process.name)] if raylet in (process / "environ").read_bytes() else []
        except OSError:  # gone
            continue
    return found


@pytest.mark.slow
def test_a_lost_node_loses_nothing_and_moves_no_number(place: Any, cluster: Any, numbers: Any) -> None:
    sweep = LONG.replace("epochs: 30", "epochs: 60")
    place.write(sweep)
    undisturbed = place.run("run", "tiny.yaml", "run.slots=2", "--results", "undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    process = place.start("run", "tiny.yaml", "--engine", "ray")
    wait_for(lambda: process.poll() is not None or (len(checkpoints(place.folder)) > 1 and workers(cluster.first)))
    assert process.poll() is None, process.communicate()
    lost = workers(cluster.first)
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(cluster.first, allow_graceful=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "trying again from its checkpoint" in out
    assert numbers(place.records()) == numbers(Store("undisturbed").read("tiny").records)
    lines = [line for path in shards(place.folder) for line in path.read_bytes().splitlines()]
    assert len(lines) == 6, "nothing was done twice"
    assert not list(Path("results").glob(".shared-*"))


def test_without_a_cluster_the_reason_is_told(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", refuse)
    said = place.run("run", place.write(LONG), "--engine", "ray")
    assert said.code == 2
    assert "--engine ray finds no cluster" in said.err


def test_without_ray_the_extra_is_named(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = place.run("run", place.write(LONG), "--engine", "ray")
    assert said.code == 2
    assert said.err == "--engine ray needs ray: pip install 'mixassay[ray]'\n"
