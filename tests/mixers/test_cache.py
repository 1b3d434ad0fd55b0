"""A cache that grows in place: the same as one that is copied for every token, whoever else goes on from it."""

import pytest
import torch
from torch import Tensor

from mixassay.mixers import nbytes
from mixassay.mixers.attention import Attention
from mixassay.mixers.parts.cache import SPARE, longer


def drawn(T: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, T, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_token_by_token_is_one_cat_and_most_are_not_copied(mode):
    tokens = drawn(5 * SPARE)
    with mode():
        cache, copies = tokens[:, :7].clone(), 0
        for t in range(7, tokens.shape[1]):
            before = cache.clone() if t % 50 == 0 else None
            old, cache = cache, longer(cache, tokens[:, t : t + 1])
            assert before is None or torch.equal(old, before)
            copies += cache.data_ptr() != old.data_ptr()
        assert torch.equal(cache, tokens)
    assert cache.shape == tokens.shape
    assert nbytes({"k": cache}) == tokens.numel() * 4, "a cache counts its tokens, not its spare room"
    assert copies == 1 + (tokens.shape[1] - 8) // (SPARE + 1), "one for the token that asks and SPARE more"


def test_two_that_go_on_from_one_cache_do_not_see_each_other():
    with torch.no_grad():
        root = longer(drawn(3), drawn(1, 1))
        one, two = longer(root, drawn(1, 2)), longer(root, drawn(2, 3))
        one_more, again = longer(one, drawn(1, 4)), longer(one, drawn(1, 5))
    parts = drawn(3), drawn(1, 1)
    for found, tail in ((root, ()), (one, (2, 1)), (two, (3, 2)), (one_more, (2, 1, 4, 1)), (again, (2, 1, 5, 1))):
        ends = [drawn(n, seed) for seed, n in zip(tail[::2], tail[1::2], strict=True)]
        assert torch.equal(found, torch.cat([*parts, *ends], dim=1))


def test_some_rows_of_a_cache_go_on_by_themselves():
    with torch.no_grad():
        cache = longer(drawn(3), drawn(1, 1))
        rows = longer(cache[[1]], drawn(1, 2)[[1]])
        assert torch.equal(longer(cache, drawn(1, 3))[:, :4], cache)
    assert torch.equal(rows, torch.cat([drawn(3), drawn(1, 1), drawn(1, 2)], dim=1)[[1]])


def test_gradients_vmap_and_mixed_dtypes_get_a_copy():
    cache = drawn(3).requires_grad_()
    longer(longer(cache, drawn(1, 1)), drawn(1, 2)).sum().backward()
    assert cache.grad is not None
    assert torch.equal(cache.grad, torch.ones_like(cache))
    a, b = drawn(8)[:, :, None], drawn(8, 1)[:, :, None]  # two members of eight rows of one token
    with torch.no_grad():
        stacked = torch.func.vmap(lambda a, b: longer(longer(a, b), b))(a, b)
    assert torch.equal(stacked, torch.cat([a, b, b], dim=2))
    with torch.no_grad():
        assert longer(drawn(3), drawn(1, dtype=torch.bfloat16)).dtype == torch.float32


def test_what_was_made_in_inference_mode_goes_on_outside():
    with torch.inference_mode():
        cache = longer(drawn(3), drawn(1, 1))
    with torch.no_grad():
        assert torch.equal(longer(cache, drawn(1, 2)), torch.cat([drawn(3), drawn(1, 1), drawn(1, 2)], dim=1))


def test_a_cache_does_not_keep_the_projections_that_it_came_from():
    m, x = Attention(16).requires_grad_(False), torch.randn(2, 300, 16)
    _, state = m.prefill(x, m.init_state(2))
    held = {name: state[name].untyped_storage().nbytes() // (2 * 16 * 4) for name in ("k", "v")}
    assert all(300 <= tokens <= 300 + SPARE for tokens in held.values()), held


@pytest.mark.parametrize("kw", [{}, {"heads": 2, "rope": True, "conv": 4}, {"window": 5}])
def test_attention_steps_as_it_reads_whole_rows(kw):
    torch.manual_seed(0)
    m, x = Attention(16, **kw).double(), torch.randn(2, 2 * SPARE + 9, 16, dtype=torch.float64)
    with torch.no_grad():
        y, state = m.prefill(x[:, :5], m.init_state(2))
        found = [y]
        for t in range(5, x.shape[1]):
            y, state = m.step(x[:, t], state)
            found.append(y.unsqueeze(1))
        torch.testing.assert_close(torch.cat(found, dim=1), m(x), rtol=1e-12, atol=1e-12)
