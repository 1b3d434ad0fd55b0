"""Evaluation of language models, ours and others', on tasks over text: RULER, LongBench, and what lm-eval brings.

    language.py   one of our models as a language model: prefill and steps, likelihoods, batches of equal lengths
    opened.py     the language model of a kept run
    adapter.py    that as a model of lm-eval: `lm_eval --model mixassay`
    question.py   what is asked: a prompt, its budget, its right answers, and a set of them with its score
    ruler.py, longbench.py, longbench_v2.py, retrieval.py, stock.py     where sets come from
    suites.py     sets by the name of a suite
    canary.py     models that know the answers, which run before any other
    script.py     what stands in the place of one of our models then
    engine.py     a set through lm-eval's engine, or without it
    session.py    `mixassay eval`: model, sets, canaries, records
    kept.py       records, prompts and answers on the disk
    table.py      tables and heatmaps of what is stored

Nothing but session.py and what it needs imports torch.
"""
