"""What the rows of language models hold beside text: samples that ask for what they have told."""
