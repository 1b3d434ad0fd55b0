"""Compression: every token is asked for at the end; the decoder sees one vector and the number of what is wanted."""

from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.model import build
from mixassay.readout import Decoder, sinusoids
from mixassay.spec import MixerSpec, ModelSpec
from mixassay.tasks.compression import Compression


def test_rows_read_as_the_definition_says() -> None:
    drawn = Compression(vocab_size=6, seq_len=9).rows(torch.arange(5000), seed=0, split="test")
    assert torch.equal(drawn.labels, drawn.tokens[:, :8])
    assert (drawn.tokens[:, 8] == 5).all()
    assert (drawn.positions == 8).all()
    both = drawn.labels[:, :7] * 5 + drawn.labels[:, 1:]
    assert stats.chisquare(torch.bincount(both[:, ::2].flatten(), minlength=25).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 2}, "vocab_size must be from 3 to 2**31, got 2"),
        ({"seq_len": 1}, "seq_len must be at least 2, got 1"),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Compression(**wrong)
    assert str(error.value) == f"compression: {message}"


def test_the_decoder_is_what_its_equation_says() -> None:
    torch.manual_seed(0)
    decoder = Decoder(6).double()
    h = torch.randn(2, 1, 6, dtype=torch.float64).expand(2, 4, 6)
    for n in range(2):
        for q in range(4):
            w = 10000 ** -(torch.arange(3, dtype=torch.float64) / 2)
            y = h[n, q] + torch.cat(((q * w).sin(), (q * w).cos()))
            for layer, norm in zip(decoder.layers, decoder.norms, strict=True):
                u = layer(y)
                u = u * 0.5 * (1 + torch.erf(u / 2**0.5))
                y = u / (u.square().mean() + 1e-5).sqrt() * norm.weight
            torch.testing.assert_close(decoder(h)[n, q], y, rtol=1e-12, atol=1e-12)
    assert sinusoids(3, 5, h)[:, 4].eq(0).all()


def test_a_model_reads_all_answers_from_one_vector_and_its_other_weights_are_as_without_decoder() -> None:
    spec, mixer = ModelSpec(d_model=8, n_layers=1), MixerSpec(name="attention")
    models = []
    for decodes in (False, True):
        torch.manual_seed(1)
        models.append(build(spec, mixer, vocab_size=6, max_len=9, decodes=decodes))
    plain, model = models
    assert model.decoder is not None
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in plain.named_parameters())
    drawn = Compression(vocab_size=6, seq_len=9).rows(torch.arange(3), seed=0, split="test")
    found = model(drawn.tokens, drawn.positions)
    hidden = plain(drawn.tokens, drawn.positions, head=lambda h, weight: h)
    assert torch.equal(hidden, hidden[:, :1].expand_as(hidden))
    torch.testing.assert_close(found, model.decoder(hidden) @ model.embedding.weight.T)
    assert len({tuple(row) for row in found[0].tolist()}) == 8, "and answers differ by what is asked"
    with pytest.raises(UserError, match="cannot generate"):
        model.prefill(drawn.tokens)
