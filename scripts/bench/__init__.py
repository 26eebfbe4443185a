"""Benchmarks: `python -m scripts.bench NAME …`, in the folder of the repository."""
