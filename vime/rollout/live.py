"""LiveRollouts: rollouts from engines. The result depends on seeds and weights alone, never on timing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vime.config.schema import Config
from vime.errors import VimeError
from vime.protocols import DataSource, Reward, RolloutEngine
from vime.reward.function import load_function
from vime.rollout.groups import Generate, GroupRunner, OnProgress, Outcome
from vime.rollout.seeds import seed_for
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

HINTS = {
    "zero_spread": "all answers to a prompt score alike: choose prompts of mixed difficulty, more samples per prompt, "
    "or rollout.group_filter=none",
    "prompt_too_long": "set data.max_prompt_len, or raise rollout.max_context_len",
    "aborted": "something aborts the requests: see the engine's log",
    "failed": "see the engine's log",
    "reward_timeout": "raise reward.timeout_seconds, or set reward.score_on_timeout",
}
"""Cause of dropping a group -> what to do when too many are dropped for it."""


class LiveRollouts:
    """Rollouts over engines: ``rollout_batch_size`` complete groups, in the order of their prompts.

    A group that is left out (prompt too long, an aborted or failed sample, a sample without verdict, equal rewards with
    ``group_filter``) is counted by cause in ``header.counts`` and replaced by the next prompt. With
    ``debug.rollout_only`` groups with log-probs that are not finite stay, unscored. UsageError at construction if
    ``rollout.generate`` cannot be used.
    """

    def __init__(
        self,
        config: Config,
        source: DataSource,
        engines: Sequence[RolloutEngine],
        reward: Reward,
        *,
        header: RolloutHeader | None = None,
        on_progress: OnProgress | None = None,
        import_paths: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.header = header or RolloutHeader()
        self._source = source
        self._runner = GroupRunner(config, engines, reward, load_generate(config, import_paths), on_progress)

    def produce(self, rollout_id: int) -> RolloutBatch:
        """One rollout. VimeError if an engine or the reward fails, time runs out, or refilling does not help."""
        return asyncio.run(self._produce(rollout_id))

    def pending(self) -> str:
        """Group ids by who has them at this moment; may be asked from another thread."""
        return self._runner.pending()

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the prompts. VimeError if the state was saved by a replay, which has no position in them."""
        if "source" not in state:
            raise VimeError(
                "the checkpoint was written by a replay of recorded rollouts: it has no position in the prompts",
                "resume it with the same debug.load_rollout_data, or start a new run from its weights",
            )
        self._source.load_state_dict(state["source"])

    async def _produce(self, rollout_id: int) -> RolloutBatch:
        settings = self.config.rollout
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.timeout_seconds
        kept: list[Outcome] = []
        dropped: Counter[str] = Counter()
        shares: list[str] = []
        for _ in range(1 + settings.max_filter_rounds):
            prompts = self._source.take(settings.rollout_batch_size - len(kept))
            seeds = [self._seeds(rollout_id, prompt.group_id) for prompt in prompts]
            outcomes = await self._runner.run(prompts, seeds, None, deadline - loop.time())
            good = [o for o in outcomes if self._is_kept(o)]
            dropped.update(o.dropped for o in outcomes if o.dropped is not None)
            kept += good
            shares.append(f"{len(good)}/{len(prompts)}")
            if len(kept) == settings.rollout_batch_size:
                return self._batch(rollout_id, [s for o in kept for s in o.samples], dropped)
        raise VimeError(
            f"rollout {rollout_id}: {len(kept)} of {settings.rollout_batch_size} groups after "
            f"{settings.max_filter_rounds} refills; kept per round: {', '.join(shares)}; "
            f"left out: {', '.join(f'{cause} {n}' for cause, n in dropped.most_common())}",
            HINTS[dropped.most_common(1)[0][0]],
        )

    def _seeds(self, rollout_id: int, group_id: int) -> list[int]:
        n = self.config.rollout.num_samples_per_prompt
        return [seed_for(self.config.run.seed, rollout_id, group_id, index) for index in range(n)]

    def _is_kept(self, outcome: Outcome) -> bool:
        if is_to_be_seen(outcome, self.config):
            outcome.dropped = None  # unscored
            return True
        if outcome.dropped is None and self.config.rollout.group_filter == "nonzero_spread":
            rewards = {sample.reward for sample in outcome.samples}
            outcome.dropped = "zero_spread" if len(rewards) == 1 else None
        return outcome.dropped is None

    def _batch(self, rollout_id: int, samples: list[Sample], dropped: Counter[str]) -> RolloutBatch:
        return RolloutBatch.from_samples(rollout_id, samples, filled(self.header, samples, dropped, self.config))


def is_to_be_seen(outcome: Outcome, config: Config) -> bool:
    """Answers whose log-probs are not finite: where nothing is trained they stay, for the verdict on the rollout."""
    if outcome.dropped != "failed" or not config.debug.rollout_only:
        return False
    return any(sample.status is Status.FAILED and "failure" in sample.metadata for sample in outcome.samples)


def filled(header: RolloutHeader, samples: Sequence[Sample], dropped: Counter[str], config: Config) -> RolloutHeader:
    """The header with what only the finished rollout knows: weight version, seed, counts by status and by cause."""
    counts = Counter(f"status_{s.status}" for s in samples) + Counter({f"dropped_{c}": n for c, n in dropped.items()})
    version = max((s.weight_version_max for s in samples), default=header.weight_version)
    return replace(header, seed=config.run.seed, weight_version=version, counts=dict(sorted(counts.items())))


def load_generate(config: Config, import_paths: Sequence[str] = ()) -> Generate | None:
    """The user function ``rollout.generate``, or None. UsageError if it cannot be called with four arguments."""
    spec = config.rollout.generate
    if spec is None:
        return None
    return load_function(spec, "rollout.generate", num_arguments=4, import_paths=import_paths)
