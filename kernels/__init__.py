"""One folder per operator: `reference.py` (the definition), `chunked.py` (torch), `op.py` (the public function).

This module only decides which of an operator's implementations serves a call. Order: the call's `backend=`
argument, a surrounding `use_backend(...)`, the variable `MIXASSAY_BACKEND`, then `auto`.
"""
