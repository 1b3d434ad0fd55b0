"""The one exception that means "the user can mend this": one line, no traceback, exit code 2."""


class UserError(ValueError):
    """What was wrong, what was found, what would be right, and where (`file:line:col: ...` where it is in a file)."""
