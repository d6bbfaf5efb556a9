"""What runs inside the processes of a debug run (``vime debug-attach run``): nothing, until one reaches a point.

``spec`` says what to stop at and travels in the environment; ``boot`` takes it up at the start of every Python process;
``instrument`` compiles the files concerned with a call before each point, in memory; ``pause`` opens a debug port on
loopback, says so in the ``registry`` and waits, for a limited time. No file is changed: nothing is left behind.
"""
