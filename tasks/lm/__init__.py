"""What the rows of language models hold beside text: questions about long texts, in RULER's format."""
