"""`python -m mixassay` is the console command."""

from mixassay.runners.cli import main

main()
