"""Generation with states against generation without, for every mixer; likelihoods against a plain forward pass."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from mixassay.errors import UserError
from mixassay.mixers import mixer, nbytes
from mixassay.runners import graph
from mixassay.runners.eval.language import Language, Wanted, cut
from mixassay.tokens import Bytes

PROMPTS = [b"a", b"needle 7", b"needle 8", b"some longer text of more than one chunk of the kernels of mixers, "]


def language(model: Any, batch: int = 16) -> Language:
    return Language(model, Bytes(), batch, "fp64")


@torch.no_grad()
def uncached(model: Any, prompt: bytes, new_tokens: int) -> str:
    """The whole text through the parallel form for every token."""
    ids = list(prompt)
    for _ in range(new_tokens):
        token = int(model(torch.tensor([ids]))[0, -1, :257].argmax())
        if token == 256:
            break
        ids.append(token)
    return Bytes().decode(ids[len(prompt) :])


@pytest.mark.parametrize("name", mixer.names())
def test_cached_generation_equals_uncached_token_by_token_in_any_batch(name: str, tiny: Any) -> None:
    model = tiny(name).double()
    wanted = [Wanted(tuple(prompt), 6) for prompt in PROMPTS]
    expected = [uncached(model, prompt, 6) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    for batch in (1, 16):
        assert language(model, batch).answers(wanted) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", mixer.names())
def test_on_a_gpu_steps_are_replayed_to_the_same_answers(name: str, precision: Any, tiny: Any) -> None:
    """By a graph where the state keeps its shapes; in two batches, of which the second finds it there."""
    wanted = [Wanted(tuple(prompt), 12 + 3 * n) for prompt in PROMPTS for n in range(4)]
    model = tiny(name).cuda()
    plain, replayed = (Language(model, Bytes(), 8, precision) for _ in range(2))
    plain.steps.replay.on = False
    assert replayed.answers(wanted) == plain.answers(wanted)
    captured = [shape for shape in replayed.steps.replay.shapes.values() if shape.graph is not None]
    assert bool(captured) == all(inner.state_law != "linear" for inner in model.mixers())
    assert not plain.steps.replay.shapes


@pytest.mark.parametrize("name", mixer.names())
def test_steps_on_the_memory_of_a_graph_give_the_same_answers(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every state is copied to where the one before was, which a step may give back unchanged."""
    monkeypatch.setattr(graph, "WARM", 10**9)
    wanted = [Wanted(tuple(prompt), 3 + n) for prompt in PROMPTS for n in range(3)]
    model = tiny(name).double()
    expected = language(model, 8).answers(wanted)
    one = language(model, 8)
    one.steps.replay.on = True
    assert one.answers(wanted) == expected
    assert bool(one.steps.replay.shapes) == all(inner.state_law != "linear" for inner in model.mixers())
    one.steps.forget()
    assert not one.steps.replay.shapes


@pytest.mark.parametrize("name", ["mamba2", "log_linear_mamba2"])
def test_rows_that_go_on_when_they_are_done_change_no_answer(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = tiny(name).double(), []
    wanted = [Wanted(tuple(b"needle %d" % n), 2 + n) for n in range(7)]
    expected = language(model).answers(wanted)
    one = language(model)
    monkeypatch.setattr(one.steps, "replays", lambda state: bool(sizes.append(len(state[0]))) or True)
    assert one.answers(wanted) == expected
    assert set(sizes) == {7, 3, 1}


def test_no_row_goes_on_beyond_the_learned_positions(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = language(tiny("linear_attention", positions=72).double())
    wanted = [Wanted(tuple(b"a" * 70), 1), Wanted(tuple(b"b" * 8), 9), Wanted(tuple(b"c" * 7), 10)]
    expected = [one.answers([single])[0] for single in wanted]
    monkeypatch.setattr(one.steps, "replays", lambda state: True)
    assert one.answers(wanted) == expected


@pytest.mark.parametrize("name", mixer.names())
def test_memory_while_decoding_is_what_the_mixer_declares(name: str, tiny: Any) -> None:
    """The state of a row behind a prompt, and behind steps: constant but for attention, whose cache has an entry a
    token. (Log-linear mixers keep all their levels from the start.)"""
    model = tiny(name)
    sizes = {}
    with torch.inference_mode():
        for T in (3, 40):
            logits, state = model.prefill(torch.randint(256, (2, T)))
            assert logits.shape == (2, 257)
            assert nbytes(state[1]) == 2 * model.state_bytes(T)
            for _ in range(2):
                _, state = model.step(torch.tensor([1, 2]), state)
            sizes[T] = nbytes(state[1])
            assert sizes[T] == 2 * model.state_bytes(T + 2)
    assert (sizes[3] == sizes[40]) == all(inner.state_law != "linear" for inner in model.mixers())


@pytest.mark.parametrize("name", ["attention", "mamba2", "log_linear_mamba2", "dla"])
def test_likelihoods_are_those_of_one_text_at_a_time(name: str, tiny: Any) -> None:
    model = tiny(name).double()
    texts = [
        (b"a", b"b"),
        (b"one two", b" three"),
        (b"one two three", b" four five"),
        (b"x" * 12, b"y"),
        (b"q", b"z" * 9),
    ]
    for batch in (1, 16):
        found = language(model, batch).likelihoods([(list(a), list(b)) for a, b in texts])
        for (before, then), (total, greedy) in zip(texts, found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([list(before + then)]))[0, len(before) - 1 : -1]
            each = logits.log_softmax(-1).gather(1, torch.tensor(list(then))[:, None])
            assert total == pytest.approx(float(each.sum()), rel=1e-9)
            assert greedy == bool((logits.argmax(-1) == torch.tensor(list(then))).all())


@pytest.mark.parametrize("name", ["attention", "mamba2"])
@pytest.mark.parametrize("call", ["prefill", "step"])
def test_a_batch_that_does_not_fit_in_memory_is_halved(
    name: str, call: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it shows in reading or in writing; with the answers of the smaller batch."""
    model = tiny(name)
    wanted = [Wanted(tuple(prompt), 6) for prompt in [*PROMPTS, b"needle 9", b"needle 10"]]
    expected = Language(model, Bytes(), 1).answers(wanted)
    tried, whole = [], getattr(model, call)

    def cramped(tokens: Any, *more: Any) -> Any:
        tried.append(len(tokens))
        if len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 918.00 MiB")
        return whole(tokens, *more)

    monkeypatch.setattr(model, call, cramped)
    one = Language(model, Bytes(), 4)
    assert one.answers(wanted) == expected
    assert max(tried) > 1
    assert one.batch == 1
    tried.clear()
    assert one.answers(wanted) == expected
    assert max(tried) == 1, "no larger batch is tried again"


def test_a_batch_that_does_not_fit_holds_nothing_when_half_of_it_is_tried(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is done."""
    model = tiny("attention")
    held: list[Any] = []
    prefill, step = model.prefill, model.step

    def read(tokens: Any) -> Any:
        assert all(one() is None for one in held)
        logits, state = prefill(tokens)
        held.extend(weakref.ref(leaf) for leaf in (logits, *pytree.tree_leaves(state)))
        return logits, state

    def write(tokens: Any, state: Any) -> Any:
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(tokens, state)

    monkeypatch.setattr(model, "prefill", read)
    monkeypatch.setattr(model, "step", write)
    gc.disable()
    try:
        Language(model, Bytes(), 5).answers([Wanted(tuple(b"needle %d" % n), 3) for n in range(5)])
    finally:
        gc.enable()
    assert len(held) == 4 * (2 + 2 * 3), "5, 2, 2 and 1 rows: logits, position, and k, v and conv of two layers"


def test_a_prompt_that_does_not_fit_in_memory_is_an_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    one = Language(tiny("mamba2"), Bytes(), 4)
    monkeypatch.setattr(one.model, "prefill", full)
    with pytest.raises(torch.OutOfMemoryError):
        one.answers([Wanted((1,), 1), Wanted((2,), 1)])


def test_likelihoods_that_do_not_fit_in_memory_together(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mamba2")
    pairs = [(list(b"one"), [n]) for n in range(6)] + [(list(b"longer"), [1])]
    expected = Language(model, Bytes(), 2).likelihoods(pairs)
    tried, whole = [], model.forward

    def cramped(tokens: Any, *more: Any, **named: Any) -> Any:
        tried.append(len(tokens))
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(tokens, *more, **named)

    monkeypatch.setattr(model, "forward", cramped)
    one = Language(model, Bytes(), 5)
    assert one.likelihoods(pairs) == expected
    assert tried == [1, 5, 2, 2, 2]
    assert one.batch == 2


def test_under_autocast_a_cache_takes_half_the_bytes_and_sums_take_all(tiny: Any) -> None:
    for name, share in (("attention", 2), ("mamba2", 1), ("gated_deltanet", 1)):
        model = tiny(name)
        one = Language(model, Bytes(), precision="bf16")
        assert len(one.answers([Wanted(tuple(b"12345678"), 2)])) == 1
        assert one.state_bytes == {8: model.state_bytes(8) // share}


def test_an_answer_that_was_generated_is_greedy(tiny: Any) -> None:
    model = tiny("mamba2")
    one = language(model)
    (text,) = one.answers([Wanted(tuple(b"needle"), 6)])
    ids = [int(i) for i in model_ids(model, b"needle", 6)]
    assert one.likelihoods([(list(b"needle"), ids)])[0][1]
    assert Bytes().decode(ids) == text
    assert not one.likelihoods([(list(b"needle"), [(i + 1) % 256 for i in ids])])[0][1]


@torch.no_grad()
def model_ids(model: Any, prompt: bytes, n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_nan_is_no_answer(tiny: Any) -> None:
    model = tiny("mamba2")
    one, right = Language(model, Bytes()), model.step

    def step(tokens: Any, state: Any) -> Any:
        logits, state = right(tokens, state)
        return logits * float("nan"), state

    model.step = step
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\) after 4 tokens"):
        one.answers([Wanted((1, 2, 3), 4)])
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"likelihoods are not numbers \(NaN\) in texts of 2 tokens"):
        one.likelihoods([([1], [2])])


@pytest.mark.parametrize("batch", [1, 4])
def test_state_bytes_are_of_the_longest_prompt_whatever_the_batch(batch: int, tiny: Any) -> None:
    model = tiny("attention")
    one = Language(model, Bytes(), batch)
    one.answers([Wanted(tuple(b"x" * n), 2) for n in (9, 5, 7)])
    assert one.state_bytes == {9: model.state_bytes(9)}


class Scripted(torch.nn.Module):
    """A model that writes given ids behind any prompt."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids, self.embedding, self.position = ids, torch.nn.Embedding(300, 1), None

    def _say(self, at: int, rows: int) -> Any:
        logits = torch.zeros(rows, 300)
        logits[:, self.ids[at]] = 1
        logits[:, 290] = 2  # an id that the tokenizer does not know
        return logits, (torch.full((rows,), at + 1), [torch.zeros(rows, 1)])

    def prefill(self, tokens: Any) -> Any:
        return self._say(0, len(tokens))

    def step(self, tokens: Any, state: Any) -> Any:
        return self._say(int(state[0][0]), len(tokens))


def test_answers_end_at_the_budget_at_stop_strings_and_at_the_end_of_the_text() -> None:
    model: Any = Scripted([*b"7 \n\nnext. ", 256, *b"never"])
    one = Language(model, Bytes(), 4)
    asked = [(99, ()), (3, ()), (1, ()), (99, ("\n",)), (99, ("\n\n", "next")), (99, ("xt.", "7")), (99, ("never",))]
    texts = one.answers([Wanted(tuple(b"p"), n, stop) for n, stop in asked])
    assert texts == ["7 \n\nnext. ", "7 \n", "7", "7 ", "7 ", "", "7 \n\nnext. "]


def test_a_stop_string_of_several_tokens_is_seen_when_it_is_whole() -> None:
    model: Any = Scripted([*"日本語。".encode(), *b"abc", 256])
    one = Language(model, Bytes())
    assert one.answers([Wanted((1,), 99, ("。",)), Wanted((1,), 4), Wanted((1,), 99)]) == [
        "日本語",
        "日\ufffd",
        "日本語。abc",
    ]
    assert cut("abc", ()) == "abc"
    assert cut("abc", ("",)) == "abc"


def test_a_prompt_longer_than_the_learned_positions_is_refused(tiny: Any) -> None:
    one = Language(tiny("attention", positions=12), Bytes())
    assert one.longest == 12
    assert len(one.answers([Wanted(tuple(b"12345678"), 5)])) == 1
    with pytest.raises(UserError, match="a prompt of 8 tokens and 6 new ones are more than the 12 positions"):
        one.answers([Wanted(tuple(b"12345678"), 6)])
    with pytest.raises(UserError, match="a prompt has no tokens"):
        one.answers([Wanted((), 1)])


def test_learned_positions_go_on_in_steps(tiny: Any) -> None:
    model = tiny("linear_attention", positions=40).double()
    assert language(model).answers([Wanted(tuple(b"needle"), 20)]) == [uncached(model, b"needle", 20)]


def test_a_tokenizer_with_more_words_than_the_model_is_refused(tiny: Any) -> None:
    class Large(Bytes):
        vocab_size = 258

    with pytest.raises(UserError, match="the model knows 257 tokens and the tokenizer makes 258"):
        Language(tiny("mamba2"), Large())


def test_a_mixer_that_must_be_told_changes_cannot_generate(tiny: Any) -> None:
    with pytest.raises(UserError, match="cannot generate"):
        Language(tiny("dla", cuts="oracle"), Bytes()).answers([Wanted((1,), 1)])
