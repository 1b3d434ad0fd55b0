"""Where installed plug-ins come from, what is wrong with some, and which of their files a run depends on."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mixassay import plugins, provenance
from mixassay.errors import UserError
from mixassay.mixers import mixer


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in entries] if group == "mixassay.mixers" else []

    monkeypatch.setattr(plugins, "entry_points", found)


def test_an_installed_class_is_found_by_the_name_of_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("other_name", "mixassay.mixers.base_conv:BaseConv"))
    monkeypatch.setattr(mixer, "_found", dict(mixer._found))
    assert "other_name" in mixer.names()
    assert "other_name" not in mixer.built_in()
    assert mixer["other_name"] is mixer["base_conv"]
    assert plugins.files() == [Path(provenance.PACKAGE / "mixers" / "base_conv.py")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("attention", "some.where:Attention")], 'mixer "attention" is built in; the installed some.where:Attention'),
        ([("twice", "a:A"), ("twice", "b:B")], 'mixer "twice" is installed twice: a:A and b:B'),
        ([("wrong", "mixassay.mixers:nbytes")], "mixassay.mixers:nbytes should be a class"),
        ([("gone", "mixassay.mixers:Nothing")], "gone .* cannot be imported: AttributeError"),
    ],
)
def test_what_is_wrong_is_said(entries: list[tuple[str, str]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *entries)
    with pytest.raises(UserError, match=message):
        mixer[entries[0][0]]


def test_a_file_of_a_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    (folder / "pack" / "below").mkdir(parents=True)
    for name, text in {
        "pack/__init__.py": "raise SystemExit('imported')",
        "pack/below/__init__.py": "",
        "pack/below/one.py": "from .two import x\nfrom ..three import y\nimport yaml, torch, numpy, os, beside",
        "pack/below/two.py": "",
        "pack/three.py": "from mixassay.mixers.parts import decay",
        "pack/unused.py": "",
        "beside.py": "",
    }.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    file = plugins.module_file("pack.below.one")
    assert file == folder / "pack" / "below" / "one.py"
    assert plugins.module_file("pack.below") == folder / "pack" / "below" / "__init__.py"
    assert plugins.module_file("pack.nowhere") is None
    assert plugins.module_file("no_such_package.at_all") is None
    assert file is not None
    found = provenance.closure([file])
    own = {name for name in found if not name.startswith("mixassay")}
    assert own == {"pack", "pack.below", "pack.below.one", "pack.below.two", "pack.three"}
    assert "mixassay.mixers.parts.decay" in found
    assert set(provenance.versions(found)) == {"PyYAML"}, "torch and numpy are the environment's, os is Python's"


def test_the_version_of_what_a_plug_in_imports_is_part_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, wrapper = tmp_path / "plain.py", tmp_path / "wrapper.py"
    plain.write_text("import torch")
    wrapper.write_text("import yaml")
    before = [provenance.source_hash([path]) for path in (plain, wrapper)]
    monkeypatch.setattr(provenance, "_installed", lambda name: "0.0.1")
    after = [provenance.source_hash([path]) for path in (plain, wrapper)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
