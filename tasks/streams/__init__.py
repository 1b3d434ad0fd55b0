"""Streams: keys and values as real vectors, from regimes that are known.

A stream is no task, since it asks nothing of a model: the audit cuts it into slots and measures what the cuts lose.
It keeps the rules of tasks: a frozen dataclass whose fields are YAML keys, a `version`, and stateless rows that are
the same bits on every device.
"""
