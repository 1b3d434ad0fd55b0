"""Small modules that several mixers share (short convolution, gated norm). Not mixers: no YAML name."""
