"""Names to objects, one registry per kind of thing (`task`, `mixer`).

A built-in is found by its file name and imported only when asked for: `mixers/mamba2.py` is `name: mamba2`, so
a missing dependency breaks one mixer, not the package. So is an installed plug-in, by the name of its entry point; one
that a sweep names (`plugins:`) registers itself when it is imported. There is no list to keep.
"""

import difflib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from mixassay import plugins
from mixassay.errors import UserError

T = TypeVar("T", bound=type)
C = TypeVar("C", bound=type)  # the class as written: a decorated class keeps its own type


def suggest(word: str, known: list[str]) -> str:
    """`Did you mean "x"?` with a leading space, or the known names when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else f" Known: {', '.join(sorted(known))}."


class Registry(Generic[T]):
    """`@mixer("name")` registers a class; `mixer["name"]` finds it; `mixer.names()` lists all."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._found: dict[str, T] = {}

    def __call__(self, name: str) -> Callable[[C], C]:
        def register(cls: C) -> C:
            taken = self._found.get(name)
            same = taken is not None and (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
            if (taken is not None and not same) or (name in self._files() and cls.__module__ != self._module(name)):
                raise UserError(
                    f'{self.kind} "{name}" is taken; choose another name for {cls.__module__}.{cls.__name__}'
                )
            self._found[name] = cast(T, cls)
            return cls

        return register

    def __getitem__(self, name: str) -> T:
        builtin, installed = name in self._files(), name in plugins.installed(self.kind)
        if builtin and installed:
            entry = plugins.installed(self.kind)[name]
            raise UserError(f'{self.kind} "{name}" is built in; the installed {entry.value} needs another name')
        if name not in self._found and builtin:
            importlib.import_module(self._module(name))
        elif name not in self._found and installed:
            cls = plugins.load_installed(self.kind, name)  # which may register itself
            self._found.setdefault(name, cast(T, cls))
        if name not in self._found:
            raise UserError(f'unknown {self.kind} "{name}".{suggest(name, self.names())}')
        return self._found[name]

    def names(self) -> list[str]:
        """Every name that can be asked for: files of the package, plug-ins installed and registered. Imports none."""
        return sorted(self._files() | set(plugins.installed(self.kind)) | set(self._found))

    def built_in(self) -> list[str]:
        """The names that come with the package."""
        return sorted(self._files())

    def _files(self) -> set[str]:
        path = importlib.import_module(self.package).__path__
        return {m.name for m in pkgutil.iter_modules(path) if not m.ispkg and not m.name.startswith("_")}

    def _module(self, name: str) -> str:
        return f"{self.package}.{name}"


def arguments(cls: type, given: tuple[str, ...] = ()) -> type[BaseModel]:
    """The strict pydantic model of a class's keyword arguments: its signature is its schema.

    `given` names the arguments that the harness supplies (for a mixer `d_model`), which YAML may not set.
    """
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]  # the class's own, of which no subclass is meant
    fields: dict[str, Any] = {}
    for p in list(inspect.signature(cls).parameters.values()):
        if p.name in given:
            continue
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.name not in hints:
            raise UserError(f"{cls.__module__}.{cls.__name__}: argument {p.name} must be named and annotated")
        fields[p.name] = (hints[p.name], ... if p.default is p.empty else p.default)
    return create_model(cls.__name__, __config__=ConfigDict(extra="forbid", strict=True, frozen=True), **fields)


def bind(cls: type, args: Mapping[str, Any], given: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments as the class's annotations want them (YAML's lists as tuples), or pydantic's ValidationError."""
    bound = arguments(cls, given).model_validate_json(json.dumps(dict(args)))
    return {name: getattr(bound, name) for name in args}
