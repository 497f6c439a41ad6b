"""Convert text, JSON lines, Parquet and Hugging Face datasets to HDF5 rows of tokens.

Nothing here imports torch: each of several processes would take seconds and memory for it.
"""
