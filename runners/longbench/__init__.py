"""LongBench: questions about long texts, in English, Chinese and code, scored as its authors do.

Version 1 (Bai et al. 2023, arXiv 2308.14508): 21 sets of six kinds, and LongBench-E, 13 of them with rows spread over
three ranges of length. Version 2 (Bai et al. 2024, arXiv 2412.15204): 503 questions with four choices.

    sets.py        the 21 sets: metric, tokens to generate, how an answer is cut
    rows.py        their rows, from files, a folder or a hub
    prompts.py     their prompts: lm-eval's templates, put right where they differ from the authors'
    truncation.py  prompts that are longer than a model reads
    metrics/       one file for each family of metrics
    score.py       a set's score from its answers; `rescore.py`: from files of predictions
    v2.py          version 2

Nothing here knows a model: an adapter loads rows, makes and cuts prompts, generates, and scores. The libraries that
this needs are the extra `lm`.
"""
