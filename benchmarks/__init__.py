"""What vime costs beside the libraries it drives: ratios, measured side by side. ``python -m benchmarks``."""
