"""What runs inside the processes of a debug run (``vime debug-attach run``): nothing, until one reaches a point.

``spec`` says what to stop at and travels in the environment; ``boot`` takes it up at the start of every Python process;
``targets`` finds the files concerned and ``instrument`` compiles them with a call of ``hit`` before each point, in
memory; ``hit`` decides whether this is the process and the time to stop; ``pause`` opens a debug port on loopback
(``tracing``), says so in the ``registry`` and waits, for a limited time. ``post_mortem`` comes to the same from an
error, ``worker`` starts it in Ray's processes, ``hold`` and ``linger`` have the others wait. No file is changed:
nothing is left behind.
"""
