"""What debugging has left in the code: found by its syntax tree, and taken out: ``vime debug-attach check``."""
