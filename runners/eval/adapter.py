"""Our models as a model of lm-eval: `lm_eval --model mixassay --model_args run=KEY`, see docs/eval.md.

Texts are read as they are: nothing stands before them but, before a text without context, the end of a text. Prompts
are never cut and never padded; one that is longer than the positions that a model has learned is an error.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mixassay.errors import UserError
from mixassay.runners.eval.language import Language, Precision, Wanted
from mixassay.runners.eval.opened import opened
from mixassay.tokens import Tokenizer

NAME = "mixassay"
UNLIMITED = 2**20
"""What is said to lm-eval of a model that reads texts of any length."""


class Adapter(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A `Language` for lm-eval."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self.language = language

    @property
    def eot_token_id(self) -> int:
        return self.language.tokenizer.end

    @property
    def max_length(self) -> int:
        return self.language.longest or UNLIMITED

    @property
    def batch_size(self) -> int:
        return self.language.batch

    @property
    def device(self) -> Any:
        return self.language.device

    @property
    def tokenizer_name(self) -> str:
        return self.language.tokenizer.identity

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.language.tokenizer.encode(string)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.language.tokenizer.decode(tokens)

    def get_model_info(self) -> dict[str, Any]:
        return {"model_num_parameters": sum(p.numel() for p in self.language.model.parameters())}

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        found = self.language.likelihoods([(before, then) for _, before, then in requests])
        for (texts, _, _), likelihood in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, likelihood)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts; one that is longer than the model reads is cut into windows that do not overlap."""
        each: list[list[tuple[Sequence[int], Sequence[int]]]] = []
        for request in requests:
            ids: list[int] = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, self.max_length, context_len=1)
            each.append([make_disjoint_window(window) for window in windows])
        found = iter(self.language.likelihoods([window for windows in each for window in windows]))
        totals = [sum(next(found)[0] for _ in windows) for windows in each]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy. Raises `UserError` where a task asks for sampling."""
        texts = self.language.answers([wanted(self.language.tokenizer, *request.args) for request in requests])
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def wanted(tokenizer: Tokenizer, prompt: str, asked: dict[str, Any]) -> Wanted:
    """From a prompt and a task's `generation_kwargs`."""
    kwargs: Any = normalize_gen_kwargs(asked, default_max_gen_toks=256)
    if kwargs.get("do_sample"):
        raise UserError(f"generation is greedy, but a task asks for sampling: {asked}")
    return Wanted(tuple(tokenizer.encode(prompt)), kwargs["max_gen_toks"], tuple(kwargs["until"]))


@register_model(NAME)
class Run(Adapter):
    """A kept run. `run`: the start of its key under `results`, or a path; `tokenizer`: "bytes" or a path, where the run
    does not say; `plugins`: files or modules, joined by "+"."""

    def __init__(
        self,
        run: str,
        results: str = "results",
        tokenizer: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        precision: Precision = "fp32",
        plugins: str = "",
        max_batch_size: int | None = None,
    ) -> None:
        rows = int(batch_size) if batch_size is not None and str(batch_size).isdecimal() else 16
        names = tuple(name for name in plugins.split("+") if name)
        found = opened(str(run), results, tokenizer, device or "auto", names)
        super().__init__(Language(found.model, found.tokenizer, rows, precision))
