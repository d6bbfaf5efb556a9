"""Start a debug run and watch over it to its end: ``vime debug-attach run`` and ``stop``."""
