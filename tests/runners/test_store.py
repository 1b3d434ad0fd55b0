import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.runners import store
from mixassay.runners.store import Store


def shards(root: Path) -> list[Path]:
    return sorted(root.rglob("*.jsonl"))


def test_what_is_appended_is_read(tmp_path, make_record):
    records = [make_record(0.1 * i, key=f"k{i}", seed=i) for i in range(3)]
    writer = Store(tmp_path)
    writer.append(records[:1])
    writer.append(records[1:])
    assert Store(tmp_path).read("demo") == (records, [])
    assert Store(tmp_path).read("another") == ([], [])
    assert Store(tmp_path / "nowhere").read("demo") == ([], [])


def test_one_writer_one_shard_in_a_folder_of_its_suite_code_and_environment(tmp_path, make_record):
    dirty = make_record().code.model_copy(update={"dirty": True, "patch": "0123456789abcdef"})
    wheel = make_record().code.model_copy(update={"commit": "none"})
    writer = Store(tmp_path)
    for i, fields in enumerate([{}, {}, {"code": dirty}, {"code": wheel}, {"suite": "other"}]):
        writer.append([make_record(key=f"k{i}", **fields)])
    Store(tmp_path).append([make_record(key="another writer")])
    folders = sorted(path.parent.relative_to(tmp_path).as_posix() for path in shards(tmp_path))
    assert folders == [
        "demo/aaaaaaaaaaaa-dirty-01234567/0123abcd",  # "-" sorts before "/"
        "demo/aaaaaaaaaaaa/0123abcd",
        "demo/aaaaaaaaaaaa/0123abcd",
        "demo/release-0.1.0/0123abcd",
        "other/aaaaaaaaaaaa/0123abcd",
    ]


def test_hidden_folders_are_not_looked_into(tmp_path, make_record, monkeypatch):
    """Checkpoints are deleted while others read, and RULER's samples are lines of JSON, too."""
    record = make_record()
    Store(tmp_path).append([record])
    for name in (".checkpoints", "gone"):
        (tmp_path / "demo" / name).mkdir()
        (tmp_path / "demo" / name / "a.jsonl").write_text("no record\n")
    look = os.scandir

    def vanished(path):
        if Path(path).name in (".checkpoints", "gone"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", vanished)
    assert Store(tmp_path).read("demo") == ([record], [])
    monkeypatch.undo()
    (path, *others) = store.shards(tmp_path)
    assert (path.parts[-2:], [other.parent.name for other in others]) == ((record.env["id"], path.name), ["gone"])


def test_a_torn_last_line_loses_nothing_else_and_needs_no_words(tmp_path, make_record):
    Store(tmp_path).append([make_record(key="k0"), make_record(key="k1")])
    (shard,) = shards(tmp_path)
    whole = shard.read_bytes()
    for cut in (1, 2, 100, len(whole) // 2 - 1):
        shard.write_bytes(whole[:-cut])
        records, warnings = Store(tmp_path).read("demo")
        assert [record.key for record in records] == (["k0", "k1"] if cut == 1 else ["k0"])
        assert warnings == []


def test_an_unreadable_line_is_named_and_the_others_are_read(tmp_path, make_record):
    Store(tmp_path).append([make_record(key=f"k{i}") for i in range(3)])
    (shard,) = shards(tmp_path)
    lines = shard.read_bytes().split(b"\n")
    lines[1] = lines[1][:30] + b"\x00" * 10 + lines[1][40:]
    shard.write_bytes(b"\n".join(lines))
    records, warnings = Store(tmp_path).read("demo")
    assert [record.key for record in records] == ["k0", "k2"]
    assert warnings == [f"{shard}:2: unreadable record skipped (not JSON)"]


def test_a_newer_schema_is_refused_by_name(tmp_path, make_record):
    Store(tmp_path).append([make_record(key="k0"), make_record(key="k1")])
    (shard,) = shards(tmp_path)
    shard.write_bytes(shard.read_bytes().replace(b'{"v":1,"key":"k1"', b'{"v":2,"key":"k1"'))
    with pytest.raises(UserError, match=r":2: written by a newer mixassay: schema 2, .* upgrade to read it") as caught:
        Store(tmp_path).read("demo")
    assert str(shard) in str(caught.value)


def test_the_first_outcome_of_a_key_stands(tmp_path, make_record):
    def at(minute: int, accuracy: float | None, **fields):
        return make_record(accuracy, time={"start": f"2026-01-01T00:0{minute}:00Z", "seconds": 1}, **fields)

    Store(tmp_path).append(
        [
            at(3, 0.7, key="lucky"),
            at(1, 0.5, key="lucky"),
            at(2, 0.5 + 1e-9, key="lucky"),
            at(1, None, key="retried", status="killed"),
            at(2, 0.6, key="retried", attempt=2),
            at(1, None, key="lost", status="oom"),
            at(2, None, key="lost", status="timeout", attempt=2),
            at(1, None, key="broken", status="diverged"),
            at(2, 0.9, key="broken"),
        ]
    )
    records, warnings = Store(tmp_path).read("demo")
    assert {r.key: (r.status, r.metrics.get("test/accuracy")) for r in records} == {
        "lucky": ("ok", 0.5),
        "retried": ("ok", 0.6),
        "lost": ("timeout", None),
        "broken": ("diverged", None),
    }
    (warning,) = warnings
    assert "not deterministic: 2 repeat(s)" in warning
    assert "diverged" in warning


def test_lines_that_a_merge_repeated_count_once(tmp_path, make_record):
    Store(tmp_path).append([make_record()])
    (shard,) = shards(tmp_path)
    shard.write_bytes(shard.read_bytes() * 2)
    assert Store(tmp_path).read("demo") == ([make_record()], [])


def test_a_full_disk_is_told_and_harms_nothing_stored(tmp_path, make_record, monkeypatch):
    writer = Store(tmp_path)
    writer.append([make_record(key="k0")])
    (shard,) = shards(tmp_path)
    before = shard.read_bytes()
    real, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:100])  # what still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "write", full)
        with pytest.raises(UserError, match=r"No space left on device; 2 finished run\(s\) were not saved"):
            writer.append([make_record(key="k1"), make_record(key="k2")])
    assert len(calls) == 2
    assert shard.read_bytes() == before
    writer.append([make_record(key="k3")])  # space again
    records, warnings = Store(tmp_path).read("demo")
    assert ([record.key for record in records], warnings) == (["k0", "k3"], [])


def test_after_a_write_that_could_not_be_taken_back_nothing_follows_the_torn_line(tmp_path, make_record, monkeypatch):
    writer = Store(tmp_path)
    writer.append([make_record(key="k0")])
    real = os.write

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "write", lambda fd, data: real(fd, data[:100]) and fail())
        patched.setattr(store.os, "ftruncate", fail)
        with pytest.raises(UserError, match="cannot write results"):
            writer.append([make_record(key="k1")])
    writer.append([make_record(key="k2")])
    records, warnings = Store(tmp_path).read("demo")
    assert (sorted(record.key for record in records), warnings) == (["k0", "k2"], [])


def test_a_folder_that_cannot_be_written_is_found_before_anything_trains(tmp_path, make_record):
    (tmp_path / "file").write_text("")
    writer = Store(tmp_path / "file" / "results")  # permissions would not stop root, a file in the way does
    with pytest.raises(UserError, match=r"results folder .* cannot be written: Not a directory"):
        writer.check_writable()
    with pytest.raises(UserError, match="cannot write results"):
        writer.append([make_record()])
    Store(tmp_path / "new" / "results").check_writable()
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_a_suite_cannot_leave_the_results_folder(tmp_path, make_record):
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(UserError, match="cannot be a folder name"):
            Store(tmp_path).append([make_record(suite=name)])


WRITER = """
import sys
from mixassay.record import parse
from mixassay.runners.store import Store
record = parse(sys.stdin.buffer.read())
store = Store(sys.argv[1])
for i in range(10**6):
    store.append([record.model_copy(update={"key": f"{sys.argv[2]}-{i}"})])
    print(i, flush=True)
"""


def test_killed_writers_lose_no_acknowledged_record(tmp_path, make_record):
    source = str(Path(store.__file__).parent.parent.parent)
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    line = make_record().line()
    writers = []
    for name in ("a", "b"):
        command = [sys.executable, "-P", str(script), str(tmp_path / "results"), name]
        env = os.environ | {"PYTHONPATH": source}
        writers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env))
        assert writers[-1].stdin is not None
        writers[-1].stdin.write(line)
        writers[-1].stdin.close()
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()  # both are at it
    time.sleep(0.3)
    acknowledged = set()
    for name, writer in zip("ab", writers, strict=True):
        writer.kill()
        assert writer.stdout is not None
        said = [0, *(int(text) for text in writer.stdout.read().splitlines())]  # the first was read above
        writer.stdout.close()
        writer.wait()
        acknowledged |= {f"{name}-{i}" for i in range(max(said) + 1)}
    records, warnings = Store(tmp_path / "results").read("demo")
    found = {record.key for record in records}
    assert acknowledged <= found
    assert len(found - acknowledged) <= 2  # written, but killed before it could say so
    assert warnings == []
    assert len(shards(tmp_path / "results")) == 2
