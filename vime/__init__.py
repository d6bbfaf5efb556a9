"""vime: reinforcement learning of language models that can be debugged."""

__version__ = "0.1.0"
