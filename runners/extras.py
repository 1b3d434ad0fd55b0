"""Libraries that only some features need: `pip install 'mixassay[EXTRA]'`."""

import importlib
from typing import Any

from mixassay.errors import UserError


def need(module: str, extra: str, what: str) -> Any:
    """The module, untyped as it may be absent. Raises `UserError`, saying what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise UserError(f"{what} needs {module.split('.')[0]}: pip install 'mixassay[{extra}]'") from problem
