"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen long-context tasks at any length, made offline.

    set = SampleSet("niah_multikey_3", 4096, HuggingFace("tokenizer.json"))
    samples = set.cached(500, Path("samples"))
    accuracy = mean(score(s.task, answer(s.prompt, s.new_tokens), s.answers) for s in samples)

A sample is as long as its task's grain allows and never longer than asked for; it knows where its needles are, and it
is a pure function of (task, length, seed, index), the tokenizer and the sources. `compat` makes the samples of the two
public generators instead. The prompts' wording, the parameters and the scores are RULER's
(github.com/NVIDIA/RULER, Apache-2.0).

    sets        a set of samples, its address, its cache           table     the tasks as data
    generate    one sample, fitted to its length (fit)             scores    of one answer
    niah, variables, words, qa     the families of prompts         sources   what they are made of
    compat      NVIDIA/RULER's and lm-eval's generators, faults included
"""
