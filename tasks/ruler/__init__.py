"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen long-context tasks at any length, made offline.

    samples = list(Ruler("niah_multikey_3", 4096, HuggingFace("tokenizer.json")).samples(500))
    accuracy = mean(score(s.task, model(s.prompt, s.new_tokens), s.answers) for s in samples)

A sample is as long as its task's grain allows and never longer than asked for; it knows where its needles are.
The prompts' wording, the parameters and the scores are RULER's (github.com/NVIDIA/RULER, Apache-2.0).
"""
