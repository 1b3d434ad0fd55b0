"""The parameters of a stack's models out of their flat rows, in one pass; the definition is in runners/stack.py."""
