"""The two public generators of RULER's tasks as they are, faults included, for numbers that must compare with theirs.

    ruler    NVIDIA/RULER at c3f5e3b (July 2026)
    lm_eval  lm-evaluation-harness 0.4.13

Both draw one sample after another from one generator, so the n-th needs all before it. Neither reads or moves a global
generator here, and nothing hangs: where the public code would, a UserError says so.
"""
