"""Entry point ``vllm.general_plugins``: vLLM loads it in each of its processes. Repairs the CPU platform alone."""

from __future__ import annotations

import os


def register() -> None:
    """Register the weight receiver; on the CPU platform also apply the repairs. May be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from vime.backends.vllm.layouts import watch_processing

    watch_processing()
    if "vime_shm" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("vime_shm", "vime.backends.vllm.receiver", "ShmReceiver")
    if current_platform.is_cpu():
        from vime.backends.vllm import cpu_repairs

        cpu_repairs.apply()
    if os.environ.get("VIME_RECORD_LOADING"):
        from vime.backends.vllm.dumping import record_first_load

        record_first_load()
