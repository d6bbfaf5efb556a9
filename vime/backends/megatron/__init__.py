"""Megatron-core as the learner. Importing this package installs the CPU redirect before any megatron import.

Light on purpose (no torch, no megatron): the configuration checker reads ``derived`` from here.
"""

from vime.backends.megatron import cpu_redirect

cpu_redirect.install()
