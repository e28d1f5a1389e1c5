"""The command line: submits files, watches batches, collects results."""
