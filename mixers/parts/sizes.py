"""Checks of the sizes that a mixer is asked for, with errors that name them."""

from mixassay.errors import UserError


def at_least(minimum: int, **sizes: int | None) -> None:
    """Raise UserError for the first size below `minimum`; None means "not given" and passes."""
    for name, size in sizes.items():
        if size is not None and size < minimum:
            raise UserError(f"{name} must be at least {minimum}, got {size}")


def head_size(d_model: int, heads: int, head_dim: int | None) -> int:
    """The channels of each head: `head_dim`, or an equal share of the model's width."""
    at_least(1, d_model=d_model, heads=heads, head_dim=head_dim)
    if head_dim is not None:
        return head_dim
    if d_model % heads:
        raise UserError(f"heads={heads} does not divide d_model={d_model}; choose another number, or give head_dim")
    return d_model // heads
