"""The root folders are part of the package by relative links, which survive clones, archives and moves of the tree."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = {name: name for name in ("tasks", "mixers", "kernels", "runners", "configs")} | {
    "published": "results/published"
}


def test_every_link_of_the_package_is_known() -> None:
    assert {path.name for path in (ROOT / "src/mixassay").iterdir() if path.is_symlink()} == set(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_relative_and_leads_to_its_folder(name: str) -> None:
    link = ROOT / "src/mixassay" / name
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / LINKS[name]).resolve()
    assert link.is_dir()
