"""Engine arguments that vime derives, and why a user may not set them. Imports nothing heavy."""

from __future__ import annotations

DERIVED_ENGINE: dict[str, str] = {
    "model": "comes from model.path",
    "tokenizer": "comes from model.path, so that token ids of prompt, engine and trainer agree",
    "skip_tokenizer_init": "the tokenizer's stop ids and the decoded text are needed",
    "dtype": "comes from model.dtype, in trainer and engine alike",
    "hf_overrides": "the trainer reads the same config.json; edit it in a copy of the model folder instead",
    "revision": "the model folder is local: model.path",
    "seed": "comes from run.seed; every sample has a seed of its own",
    "max_model_len": "comes from rollout.max_context_len, or data.max_prompt_len + rollout.sampling.max_response_len",
    "tensor_parallel_size": "comes from rollout.engine_tp",
    "data_parallel_size": "use rollout.num_engines",
    "logprobs_mode": "is processed_logprobs: the log-probs of the distribution sampled from",
    "generation_config": "is 'vllm': every sampling option comes from rollout.sampling",
    "override_generation_config": "every sampling option comes from rollout.sampling",
    "worker_extension_cls": "is vime's own: it reads weights back and digests them",
    "weight_transfer_config": "comes from weights.transport",
    "enable_sleep_mode": "comes from cluster.colocate",
    "enable_lora": "the trainer sends whole tensors",
    "runner": "is 'generate'",
}
