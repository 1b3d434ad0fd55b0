"""The bias audit: what a cut of the past into slots costs, next to its bound and to the best cut there is.

Tokens are u_t = k_t v_t^T, a cut is blocks C_1 .. C_m of consecutive ones, and a slot remembers the sum of its block.
A read with one weight a token, y = sum_t w_t q^T u_t, becomes one with a weight a block, the mean of w. The bias of
that is (Wang et al. 2026, theorem 3.1; the block means are those of the tokens)

    bias = |sum_i sum_{t in C_i} (w_t - mean w) q^T (u_t - mean u)|  <=  D1  <=  B          for |w_t| <= 1
    D1   = sum_i sum_{t in C_i} |q^T (u_t - mean u)|            reached by the worst weights if V = 1
    B    = |q| sum_i sqrt(|C_i| sum_{t in C_i} |u_t - mean u|^2)

Equal weights make no bias at all, whatever the cut: what is audited is how well slots can tell tokens apart.

`config.py` reads a file, `cuts.py` has the policies, `measure.py` the numbers, `run.py` brings them together,
`table.py` and `plot.py` show them.
"""
