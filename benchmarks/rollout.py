"""Tokens per second of a rollout through vime against bare ``vllm.LLM.generate`` on the same requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.bare_vllm import ENVIRONMENT
from benchmarks.cases import QUICKSTART, TINY, Case
from benchmarks.measure import Goal, Result, compare, interleave
from benchmarks.process import ONE_THREAD, Side
from vime.cluster.engines import RayEngines
from vime.cluster.placement import place
from vime.cluster.session import RaySession
from vime.config.schema import Config
from vime.data.prompts import PromptSource
from vime.data.tokenizer import load_tokenizer
from vime.reward.pool import RewardPool
from vime.rollout.live import LiveRollouts
from vime.types import RolloutBatch

GOAL = Goal(at_least=0.95)


def run(repetitions: int, cases: Sequence[Case] = (QUICKSTART, TINY)) -> Result:
    result = Result("rollout")
    result.notes.append(
        "measured: LiveRollouts.produce through a Ray actor, text decoded and reward `format` computed; "
        "against: vllm.LLM.generate, the same token ids, seeds, sampling and engine arguments, no text, no reward"
    )
    session = RaySession.start(cases[0].config())  # one for all: a process can join one private cluster only
    with ExitStack() as whole:
        whole.callback(session.close)
        for case in cases:
            with ExitStack() as stack:
                _measure(case, repetitions, result, session, stack)
    return result


def _measure(case: Case, repetitions: int, result: Result, session: RaySession, stack: ExitStack) -> None:
    config = case.config()
    through = Through.start(config, session, stack)
    bare = stack.enter_context(Side("benchmarks.bare_vllm:BareEngine", config, env=ONE_THREAD | ENVIRONMENT))
    sides = {"vime": through.produce, "bare": lambda turn: bare.call("generate", requests(through.batches[turn]))}
    found = interleave(sides, repetitions)
    bare_rates = [tokens / seconds for tokens, seconds, _ in found["bare"]]
    result.rows.append(compare(case.title, "response tokens/s", found["vime"], bare_rates, GOAL))
    same = sum(
        _num_equal(through.batches[-repetitions + i], answers) for i, (_, _, answers) in enumerate(found["bare"])
    )
    result.notes.append(
        f"{case.name}: {same} of {repetitions * len(through.batches[0])} samples equal, token for token"
    )


@dataclass
class Through:
    """vime's way to a rollout, timed."""

    rollouts: LiveRollouts
    batches: list[RolloutBatch]

    @classmethod
    def start(cls, config: Config, session: RaySession, stack: ExitStack) -> Through:
        """The engine and the reward's worker; they end with ``stack``."""
        engines = RayEngines(config, session, place(config, session.resources()).engine_options)
        engines.begin()
        source = PromptSource(config.data, load_tokenizer(config.model.path), seed=config.run.seed)
        reward = stack.enter_context(RewardPool(config.reward))
        engines.wait()
        stack.callback(engines.shutdown)
        return cls(LiveRollouts(config, source, engines.engines, reward), [])

    def produce(self, turn: int) -> float:
        """Response tokens per second of one rollout."""
        start = time.perf_counter()
        batch = self.rollouts.produce(turn)
        seconds = time.perf_counter() - start
        self.batches.append(batch)
        return int(batch.response_lens_N.sum()) / seconds


def requests(batch: RolloutBatch) -> list[tuple[list[int], int]]:
    """(prompt token ids, seed) of every sample."""
    return [(sample.token_ids[: sample.prompt_len].tolist(), sample.seed) for sample in batch.samples()]


def _num_equal(batch: RolloutBatch, answers: Sequence[Any]) -> int:
    return sum(
        np.array_equal(sample.token_ids[sample.prompt_len :], answer)
        for sample, answer in zip(batch.samples(), answers, strict=True)
    )
