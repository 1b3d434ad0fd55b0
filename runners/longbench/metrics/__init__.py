"""The metrics of LongBench v1, a file for each family. Each maps a prediction and one right answer to [0, 1]."""
