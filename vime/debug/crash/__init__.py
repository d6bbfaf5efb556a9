"""Which settings and which requests make the engine crash: the search of ``vime rollout --bisect-crash``."""
