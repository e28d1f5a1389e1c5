"""Tables as input and output: parquet, Arrow and CSV. Their rows are lines to everything else."""
