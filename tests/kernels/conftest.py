"""Triton's interpreter without what it does again and again: the same functions, called with the same numbers.

It puts its own functions in the place of the language's at every launch, which it undoes at the launch's end, and again
at every call of a helper from within a kernel, where all of it is in place already: a third of the time of the tests
of kernels. And it makes a table of types for every number that it makes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def brisk_interpreter() -> Iterator[None]:
    """Of a Triton that has these names, which are private; any other is as slow as it is."""
    if torch.cuda.is_available():
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "_get_np_dtype")):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        Scope: Callable[[], Any] = interpreter._LangPatchScope
        put, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        make_type, types = interpreter._get_np_dtype, dict[str, Any]()
        there: set[int] = set()  # modules whose language is the interpreter's until the launch ends

        def put_once(fn: Any) -> Any:
            module = id(fn.__globals__)
            if module in there:
                return Scope()
            there.add(module)
            return put(fn)

        def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
            there.clear()
            launch(self, *args, **kwargs)

        def numpy_type(dtype: Any) -> Any:
            name = dtype.scalar.name
            if name not in types:
                types[name] = make_type(dtype)
            return types[name]

        patch.setattr(interpreter, "_patch_lang", put_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        yield
