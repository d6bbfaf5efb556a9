"""Forward + backward of the policy loss: Megatron-core as vime drives it against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.cases import QUICKSTART, TINY, Case
from benchmarks.measure import Goal, Result, compare, interleave
from benchmarks.process import ONE_THREAD, Side
from vime.models import load_spec
from vime.types import TrainData

GOAL = Goal(at_least=1.0)
PROMPT_LEN = 24
MAX_RESPONSE_LEN = 64
MAX_TOKENS_PER_MICRO_BATCH = 512
NUM_SEQUENCES = {"quickstart": 8, "tiny": 128}


def run(repetitions: int, cases: Sequence[Case] = (QUICKSTART, TINY)) -> Result:
    result = Result("trainer")
    result.notes.append(
        "both: gradients zeroed, micro-batches of at most 512 tokens laid out, forward, log-probs, clipped loss, "
        "backward; no optimizer step. One thread, float32, tokens counted without padding. vime also computes the "
        "entropy; transformers does not. padded: right-padded batches in the order of the samples, attention mask; "
        "packed: one row, position_ids, torch SDPA"
    )
    for case in cases:
        with ExitStack() as stack:
            _measure(case, repetitions, result, stack)
    return result


def _measure(case: Case, repetitions: int, result: Result, stack: ExitStack) -> None:
    config = case.config(algo={"log_ref": False}, train={"max_tokens_per_micro_batch": MAX_TOKENS_PER_MICRO_BATCH})
    data = make_data(NUM_SEQUENCES[case.name], load_spec(config.model.path).vocab_size)
    megatron = stack.enter_context(Side("benchmarks.trainer_sides:Megatron", config, env=ONE_THREAD))
    transformers = stack.enter_context(Side("benchmarks.trainer_sides:Transformers", config, env=ONE_THREAD))
    sides = {
        "vime": lambda turn: megatron.call("forward_backward", data),
        "padded": lambda turn: transformers.call("forward_backward", data, "padded"),
        "packed": lambda turn: transformers.call("forward_backward", data, "packed"),
    }
    found = interleave(sides, repetitions)
    tokens = len(data.token_ids_T)
    rates = {name: [tokens / p.seconds for p in passes] for name, passes in found.items()}
    for name, goal in (("padded", GOAL), ("packed", None)):
        what = f"{case.name}, {tokens} tokens, against transformers {name}"
        result.rows.append(compare(what, "tokens/s", rates["vime"], rates[name], goal))
    norms = {name: passes[0].grad_norm for name, passes in found.items()}
    apart = ", ".join(f"{abs(norms[n] / norms['vime'] - 1):.1e} ({n})" for n in ("padded", "packed"))
    padding = found["padded"][0].num_positions / tokens - 1
    result.notes.append(
        f"{case.name}: gradient norm {norms['vime']:.6g}, relative difference of transformers' {apart}; "
        f"padding: {padding:.0%} more positions"
    )


def make_data(num_sequences: int, vocab_size: int) -> TrainData:
    """Random tokens: prompts of 24, responses of 8 to 64, advantages +-1 in turn, all from one seed."""
    random = np.random.default_rng(0)
    lengths = PROMPT_LEN + random.integers(8, MAX_RESPONSE_LEN, num_sequences, endpoint=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    is_response = within >= PROMPT_LEN
    sign = np.repeat(np.where(np.arange(num_sequences) % 2, 1.0, -1.0), lengths)
    log_probs = np.where(is_response, -np.log(vocab_size), 0.0).astype(np.float32)
    return TrainData(
        offsets=offsets,
        token_ids_T=random.integers(3, vocab_size, offsets[-1]).astype(np.int32),
        loss_weight_T=is_response.astype(np.float32),
        advantages_T=(sign * is_response).astype(np.float32),
        rollout_log_probs_T=log_probs,
        old_log_probs_T=log_probs,
        ref_log_probs_T=None,
        normalizer=float(is_response.sum()),
        sample_ids=[f"{i}/0" for i in range(num_sequences)],
    )
