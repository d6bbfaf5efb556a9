"""What has stopped, and how to get at it: ``vime debug-attach list``, ``connect``, ``resume``, ``pause``."""
