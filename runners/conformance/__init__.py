"""Is this mixer what it claims to be? One file a check, its claim on the first line; `table.py` lists and runs them.

A check is a function of a `Subject`, the mixer under test. It returns what it measured, or raises `Failed` with the
smallest input that it found, or `NotOffered` where the mixer has no such form.
"""
