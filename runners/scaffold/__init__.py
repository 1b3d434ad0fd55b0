"""A mixer to start from: its file, its test and a sweep, which run as they are. The templates lie beside this file."""

import keyword
import re
import sys
from pathlib import Path

from mixassay.errors import UserError
from mixassay.provenance import PACKAGE

TEMPLATES = ("my_mixer.py", "test_my_mixer.py", "my_mixer.yaml")


def write_mixer(name: str, folder: Path) -> list[Path]:
    """Writes the three files for a mixer of that name. `UserError` where the name will not do or a file is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"a mixer's name is a Python name in lower case, such as my_mixer, got {name}")
    if keyword.iskeyword(name) or (PACKAGE / "mixers" / f"{name}.py").exists():
        raise UserError(f"{name} is taken, by a built-in mixer or by Python; choose another name")
    if name in sys.stdlib_module_names or name == "torch":
        raise UserError(f"{name}.py would hide the Python module {name}; choose another name")
    here = Path(__file__).parent
    paths = {folder / file.replace("my_mixer", name): here / file for file in TEMPLATES}
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists already")
    camel = "".join(word.capitalize() for word in name.split("_"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in paths.items():
            path.write_text(template.read_text().replace("my_mixer", name).replace("MyMixer", camel))
    except OSError as problem:
        raise UserError(f"cannot write to {folder}: {problem.strerror}") from problem
    return list(paths)
