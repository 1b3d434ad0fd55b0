"""Dynamic linear attention (Wang et al. 2026): the past cut into at most S slots where the tokens themselves change.

A token's state is s_t = k_t v_t^T. It opens a new segment where it is far from what the open segment holds
(`boundaries.py`); a full cache first merges two neighbouring slots (`slots.py`). Both are integers without gradient:
a schedule (`schedule.py`), which a mask (`dense.py`), a chunked form (`chunked.py`) or a decoder (`op.py`) then only
follows; `schedule_reference.py` and `reference.py` are the definitions, token by token. `straight_through.py` and
`register.py` give the boundaries a gradient.

    slot    by recency rank: 0 is open, 1 the last closed, ... m - 1 the oldest, m <= S. Each is a range of tokens
    shift   one integer a token: -1 at no boundary, else ranks 0 .. shift move up by one and the token enters rank 0.
            shift = S - 1 while there is room; in a full cache the slot of rank `shift` meets the one above it
    score   0 (what the segment holds already) to 2 (its opposite), sqrt(2) for an orthogonal token
"""

from mixassay.kernels.dla.op import dla, dla_step

__all__ = ["dla", "dla_step"]
