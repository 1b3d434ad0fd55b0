"""One file, one step of a run: plan, train, evaluate, store, report; and the command line that calls them."""
