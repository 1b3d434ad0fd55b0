"""AdamW's update in one pass; the definition is in runners/optim.py."""
