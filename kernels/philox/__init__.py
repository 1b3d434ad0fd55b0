"""Counter-based random words on a GPU; the definition, bit for bit, is in src/mixassay/draws.py."""
