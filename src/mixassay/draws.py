"""Stateless random numbers: Philox4x32-10 (Salmon et al., SC'11), written in torch integer operations.

A draw is a pure function of (key, counter), so a row of data, a permutation or a dropout mask is the same bits on
every device, in any batch order and in any stack. No global generator is read or moved.
"""
