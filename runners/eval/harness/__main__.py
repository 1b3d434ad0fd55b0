"""lm-eval's own command line, which knows our models: python -m mixassay.runners.eval.harness --model mixassay ..."""

from lm_eval.__main__ import cli_evaluate

from mixassay.runners.eval import adapter  # noqa: F401  (registers `--model mixassay`)

if __name__ == "__main__":
    cli_evaluate()
