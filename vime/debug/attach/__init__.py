"""What runs in the terminal of the one who debugs: start a debug run, find what has stopped, attach to it."""
