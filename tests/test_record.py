import json
import math

import pytest

from mixassay import record
from mixassay.record import Curve, EvalCell, NewerSchema, RunRecord, Unreadable, parse, run_key
from mixassay.spec import RunSpec

SPEC = {
    "suite": "demo",
    "task": {"name": "mqar", "seq_len": 64},
    "mixer": {"name": "attention"},
    "model": {},
    "train": {"steps": 10, "lr": 0.01},
    "seed": 0,
}


def test_a_record_survives_its_line(make_record):
    cell = EvalCell(split="test", cell={"num_kv": 4}, rows=10, scored=40, accuracy=1 / 3, loss=0.1)
    curve = Curve.model_validate({"step": [10, 20], "train/loss": [2.0, 1.0]})
    whole = make_record(1 / 3, eval=[cell], curve=curve, state_bytes={"64": 8192}, weights="sha256:00")
    line = whole.line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert parse(line) == whole
    assert parse(line).curve["train/loss"] == (2.0, 1.0)
    assert json.loads(line)["curve"]["step"] == [10, 20]


def test_what_is_not_finite_becomes_null_and_the_status_stays(make_record):
    broken = make_record(
        status="diverged",
        metrics={"valid/loss": math.nan, "test/loss": math.inf},
        curve={"step": [1], "train/loss": [-math.inf]},
    )
    data = json.loads(broken.line(), parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert data["metrics"] == {"valid/loss": None, "test/loss": None}
    assert data["curve"]["train/loss"] == [None]
    assert parse(broken.line()) == broken
    assert parse(broken.line()).status == "diverged"


def test_lines_that_hold_no_record_say_why(make_record):
    line = make_record().line()
    for text, why in (
        (line[:50], "not JSON"),
        (b"\x00\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", 'no schema number "v"'),
        (line.replace(b'"v":1', b'"v":"x"'), 'no schema number "v"'),
        (line.replace(b'"ok"', b'"fine"'), "status: "),
        (line.replace(b'"v":1', b'"v":0'), "v: "),
    ):
        with pytest.raises(Unreadable, match=why):
            parse(text)


def test_a_newer_schema_is_refused(make_record):
    with pytest.raises(NewerSchema, match=r"schema 7, but .* up to 1"):
        parse(make_record().line().replace(b'"v":1', b'"v":7'))


def test_an_older_schema_is_migrated_step_by_step(make_record, monkeypatch):
    old = make_record().line().replace(b'"v":1', b'"v":-1').replace(b'"seed"', b'"Seed"')
    monkeypatch.setitem(record.MIGRATIONS, -1, lambda data: data | {"v": 0, "seed_": data["Seed"]})
    monkeypatch.setitem(
        record.MIGRATIONS, 0, lambda data: {k.lower().rstrip("_"): v for k, v in data.items()} | {"v": 1}
    )
    assert parse(old) == make_record()


ODD = {
    "the usual": {},
    "quotes": {"config": {"mixer": {"name": 'a","metrics":{}'}, "train": {}}, "env": {"id": '","data":"x'}},
    "an argument named like a field": {"config": {"mixer": {"name": "a", "config": 1, "metrics": {"b": 2}, "data": 3}}},
    "and swept": {"axes": {"mixer": {"name": "a", "config": {"b": 1}, "metrics": 2, "env": {}, "data": 0}}},
    "a cell named like a field": {
        "eval": [
            {"split": "test", "cell": {"env": {"id": 1}, "data": 2}, "rows": 1, "scored": 1, "accuracy": 1, "loss": 0}
        ]
    },
    "nothing there": {"config": {}, "env": {"id": "x"}},
}


@pytest.mark.parametrize("odd", ODD)
def test_what_lines_share_is_read_as_it_stands_on_each(make_record, odd):
    shared: record.Shared = {}
    plain = [make_record(0.1 * i, key=f"k{i}") for i in range(3)]
    lines = [r.line() for r in [*plain, make_record(**ODD[odd]), plain[0], make_record(0.9, **ODD[odd])]]
    records = [parse(line, shared) for line in lines]
    assert records == [parse(line) for line in lines]
    assert records[0].config is records[2].config, "one for all that repeat it"
    assert records[0].env is records[2].env
    with pytest.raises(Unreadable):
        parse(lines[0][:-20], shared)
    with pytest.raises(Unreadable, match="env"):
        parse(lines[0].replace(b'"device":"cpu"', b'"device":[1]'), shared)
    with pytest.raises(NewerSchema):
        parse(lines[0].replace(b'"v":1', b'"v":7'), shared)


def spec(**changes) -> RunSpec:
    return RunSpec.model_validate({**SPEC, **changes}, strict=False)


def test_the_key_names_all_that_moves_a_number():
    base = run_key(spec(), "source", "mqar/1", "cpu")
    others = [
        run_key(spec(seed=1), "source", "mqar/1", "cpu"),
        run_key(spec(role="tune"), "source", "mqar/1", "cpu"),
        run_key(spec(train={"steps": 10, "lr": 0.02}), "source", "mqar/1", "cpu"),
        run_key(spec(mixer={"name": "attention", "heads": 2}), "source", "mqar/1", "cpu"),
        run_key(spec(), "other source", "mqar/1", "cpu"),
        run_key(spec(), "source", "mqar/2", "cpu"),
        run_key(spec(), "source", "mqar/1", "cuda"),
    ]
    tuned = [spec(train={"steps": 10, "lr": lr}, tuned={"train.lr": lr}) for lr in (0.01, 0.02)]
    assert tuned[0].cell == tuned[1].cell
    others += [run_key(run, "source", "mqar/1", "cpu") for run in tuned]
    assert len({base, *others}) == len(others) + 1
    assert base == run_key(spec(suite="another", axes={"mixer": "attention"}), "source", "mqar/1", "cpu")


def test_unknown_fields_are_refused(make_record):
    with pytest.raises(ValueError, match="extra"):
        RunRecord.model_validate(make_record().model_dump() | {"surprise": 1})


@pytest.mark.parametrize(
    ("fields", "name"),
    [({}, "aaaaaaaaaaaa"), ({"dirty": True}, "aaaaaaaaaaaa-dirty"), ({"commit": "none", "version": "1.2"}, "1.2")],
)
def test_code_is_named_by_its_commit_or_else_its_release(fields, name, make_record):
    assert make_record().code.model_copy(update=fields).name == name
