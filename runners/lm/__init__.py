"""Language models: one at a time, in micro-batches, on one GPU or several of a host (`train.loop: lm`).

train       a run from its first step, or its checkpoint, to its outcome     training   the state between two steps
ranks       the processes that share a run's rows                            batches    their rows, made ahead
loss        cross-entropy without all logits at once                         evaluate   held-out rows, by position
work        floating-point operations of a token, and the share of a device's peak
figure      loss by position                                                 scale      what the papers' runs would take
"""
