"""Generate and score groups side by side: which engine gets what, what counts as an answer, what is said on failure."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vime.config.schema import Config
from vime.data.problems import NUM_SHOWN
from vime.errors import OutOfTime, PromptTooLong, VimeError
from vime.log import get_logger
from vime.protocols import Reward, RolloutEngine
from vime.rollout.awaited import awaited
from vime.types import Prompt, Sample

log = get_logger(__name__)

CANCEL_TIMEOUT_SECONDS = 10.0
MIN_SUSPICIOUS_TOKENS = 4
"""So many sampled tokens, all with log-prob exactly 0.0, were not measured (a few such tokens can happen)."""

Generate = Callable[..., Awaitable[list[Sample]]]
"""User function: async (engine, prompt, seeds, sampling) -> one Sample per seed, in order.

``engine.tokenizer`` is the policy's; ``sampling`` has every field of rollout.sampling, and ``engine.generate`` takes
changes of them for each call. Samples of several turns: ``vime.rollout.turns``.
"""

OnProgress = Callable[[int, int, int], None]
"""Called with samples done, samples asked for (of this round of prompts), response tokens so far."""


@dataclass(slots=True)
class Outcome:
    """What became of one prompt: its samples, all scored; or the cause why the group was left out."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    dropped: str | None = None


@dataclass
class GroupRunner:
    """Runs prompts through engines and reward. ``generate`` replaces the engine's own single-turn generation."""

    config: Config
    engines: Sequence[RolloutEngine]
    reward: Reward
    generate: Generate | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        self._outstanding_tokens = [0] * len(self.engines)
        self._where: dict[int, str] = {}  # group id -> who has it now
        self._first_failure: tuple[str, Exception] | None = None

    def pending(self) -> str:
        """Group ids by who has them at this moment; "" while nothing runs. May be asked from another thread."""
        return _pending(dict(self._where))

    async def run(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | None,
        timeout_seconds: float,
    ) -> list[Outcome]:
        """One Outcome per prompt, in the order of ``prompts`` whatever finishes first; ``seeds`` one list per prompt.

        Engines are asked with ``sampling`` (single fields of rollout.sampling). VimeError from the first cause if an
        engine, the user function or the reward fails, or if time runs out; it names the groups that were pending.
        """
        self._where, self._first_failure = {}, None
        progress = _Progress(sum(map(len, seeds)), self.on_progress)
        tasks = [
            asyncio.create_task(self._group(prompt, group_seeds, sampling, progress))
            for prompt, group_seeds in zip(prompts, seeds, strict=True)
        ]
        if not tasks:
            return []
        _, pending = await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_EXCEPTION)
        where, failure = dict(self._where), self._first_failure  # what cancelling brings forth is no cause
        culprit = self._awaited(tasks) if pending else ""
        if pending:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=CANCEL_TIMEOUT_SECONDS)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at, or asyncio logs every one that is not the first
        if failure is not None:
            raise _failure(*failure, where) from failure[1]
        if pending:
            raise OutOfTime(
                f"no complete rollout within rollout.timeout_seconds={self.config.rollout.timeout_seconds:g}; "
                f"pending: {_pending(where)}",
                "raise the limit, or lower rollout_batch_size or sampling.max_response_len",
                culprit,
            )
        if where:
            text = f"{_pending(where)}: cancelled from within, without an answer"
            raise VimeError(text, "a function that cancels a task of its own must catch asyncio.CancelledError of it")
        return [task.result() for task in tasks]

    def _awaited(self, tasks: Sequence[asyncio.Task[Outcome]]) -> str:
        """Who is waited for, where that is the user's function; it is on no stack."""
        at = "" if self.generate is None else awaited(tasks, asyncio.all_tasks())
        return f"rollout.generate = {self.config.rollout.generate} waits at {at}" if at else ""

    async def _group(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None, progress: _Progress
    ) -> Outcome:
        try:
            outcome = await self._generate(prompt, seeds, sampling)
            if outcome.dropped is None:
                self._where[prompt.group_id] = "reward"
                await self._score(outcome)
        except Exception as error:
            who = self._where.get(prompt.group_id, "rollout")
            self._first_failure = self._first_failure or (f"{who} failed on group {prompt.group_id}", error)
            raise
        del self._where[prompt.group_id]
        progress.add(len(seeds), outcome)
        return outcome

    async def _generate(self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None) -> Outcome:
        at = min(range(len(self.engines)), key=lambda i: self._outstanding_tokens[i])
        engine = self.engines[at]
        effective = self.config.rollout.sampling.model_dump() | dict(sampling or {})
        cost = len(seeds) * (len(prompt.token_ids) + effective["max_response_len"])
        self._outstanding_tokens[at] += cost
        self._where[prompt.group_id] = f"engine {at}"
        try:
            if self.generate is None:
                samples = await engine.generate(prompt, seeds, sampling)
            else:
                self._where[prompt.group_id] = f"rollout.generate ({self.config.rollout.generate}, engine {at})"
                samples = await _called(self.generate, engine, prompt, seeds, effective)
        except PromptTooLong as error:
            log.warning("group %d dropped, %d prompt tokens: %s", prompt.group_id, len(prompt.token_ids), error)
            return Outcome(prompt, dropped="prompt_too_long")
        finally:
            self._outstanding_tokens[at] -= cost
        check_answers(prompt, seeds, samples, is_from_user=self.generate is not None)
        for sample, seed in zip(samples, seeds, strict=True):
            sample.seed = seed
            sample.label = prompt.label if sample.label is None else sample.label
            sample.prompt_text = sample.prompt_text or prompt.text
        bad = next((s.status for s in samples if not s.status.is_trainable), None)
        return Outcome(prompt, samples, None if bad is None else str(bad))

    async def _score(self, outcome: Outcome) -> None:
        scores = await self.reward.score_group(outcome.samples)
        for sample, score in zip(outcome.samples, scores, strict=True):
            sample.reward = score
        if any(score is None for score in scores):
            outcome.dropped = "reward_timeout"


async def _called(function: Generate, *arguments: Any) -> Any:
    """What a user function returns. What it raises keeps its type and gets a note of the place.

    SystemExit becomes a VimeError: it would end the run without a word, after ``sys.exit(0)`` as a success.
    """
    try:
        answer = function(*arguments)
        if not inspect.isawaitable(answer):
            raise VimeError(f"returned {_shape(answer)} at once", "it must be an async function")
        return await answer
    except VimeError:
        raise
    except SystemExit as error:
        raise VimeError(f"raised SystemExit: {error} {_place(error)}", "let it raise another exception") from error
    except Exception as error:
        error.add_note(_place(error))
        raise


def _place(error: BaseException) -> str:
    """Where it was raised, in code that is not installed as a package."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "site-packages" not in f.filename), frames[-1])
    return f"({frame.filename}:{frame.lineno})"


@dataclass
class _Progress:
    total: int
    callback: OnProgress | None
    done: int = 0
    tokens: int = 0

    def add(self, num_samples: int, outcome: Outcome) -> None:
        self.done += num_samples
        self.tokens += sum(s.response_len for s in outcome.samples)
        if self.callback is not None:
            self.callback(self.done, self.total, self.tokens)


def check_answers(prompt: Prompt, seeds: Sequence[int], samples: Any, is_from_user: bool) -> None:
    """VimeError if ``samples`` is not one Sample per seed, in order, with the ids and log-probs the engine sampled."""
    expected = f"expected a flat list of {len(seeds)} Sample, one per seed, for group {prompt.group_id}"
    if not isinstance(samples, list) or len(samples) != len(seeds) or not all(isinstance(s, Sample) for s in samples):
        raise VimeError(f"returned {_shape(samples)}; {expected}", _how_to_return(samples))
    for index, sample in enumerate(samples):
        if (sample.group_id, sample.index) != (prompt.group_id, index):
            raise VimeError(f"returned {sample.name} at place {index}; {expected}")
        replace(sample)  # all that holds of a Sample is checked again: a function may have changed its fields
        problem = _text_only_problem(sample) if is_from_user else _prompt_problem(sample, prompt)
        if problem and sample.status.is_trainable:
            raise VimeError(f"{sample.name}: {problem}")


def _how_to_return(samples: Any) -> str:
    """What to change in the function, by what it returned."""
    if isinstance(samples, Sample):
        return "return [sample]: a list, even for one seed"
    if isinstance(samples, list) and any(isinstance(s, list | tuple) for s in samples):
        return (
            "return [sample, ...], not a list of lists: rollout.num_samples_per_prompt says how many samples a prompt "
            "gets, seeds has one entry for each, and turns of one sample belong into that sample (vime.rollout.turns)"
        )
    if isinstance(samples, list) and all(isinstance(s, Sample) for s in samples):
        return "return one sample for each entry of seeds, in that order; one that has no answer gets status aborted"
    return "return the list that engine.generate(prompt, seeds, sampling) gives, or one Sample of Turns.sample() a seed"


def _text_only_problem(sample: Sample) -> str | None:
    """Ids made from text again are not those that were sampled, and their log-probs belong to other tokens."""
    hint = "keep token_ids, loss_mask and rollout_log_probs as the engine returned them"
    num_sampled = int(sample.loss_mask.sum())
    if sample.text and sample.response_len == 0:
        return f"has text but no response tokens: {hint}"
    if sample.response_len > 0 and num_sampled == 0:
        return f"has {sample.response_len} response tokens and none that the policy sampled (loss_mask): {hint}"
    if num_sampled >= MIN_SUSPICIOUS_TOKENS and not sample.rollout_log_probs[sample.loss_mask].any():
        return f"has {num_sampled} sampled tokens without log-probs (all are 0.0): {hint}"
    return None


def _prompt_problem(sample: Sample, prompt: Prompt) -> str | None:
    if np.array_equal(sample.token_ids[: sample.prompt_len], prompt.token_ids):
        return None
    return f"its {sample.prompt_len} prompt tokens are not the {len(prompt.token_ids)} that were sent"


def _shape(value: Any) -> str:
    if isinstance(value, list) and value:
        return f"a list of {len(value)} {_shape(value[0]) if isinstance(value[0], list) else type(value[0]).__name__}"
    return "an empty list" if isinstance(value, list) else f"a {type(value).__name__}"


def _failure(what: str, error: Exception, where: Mapping[int, str]) -> VimeError:
    if isinstance(error, VimeError):
        return VimeError(f"{what}: {error.message}; pending: {_pending(where)}", error.hint)
    noted = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return VimeError(f"{what}: {type(error).__name__}: {error}{noted}; pending: {_pending(where)}")


def _pending(where: Mapping[int, str]) -> str:
    """Group ids by who has them: "engine 0: groups 3, 5; reward: groups 4"."""
    parts = []
    for who in sorted(set(where.values())):
        ids = sorted(group_id for group_id, holder in where.items() if holder == who)
        more = f" and {len(ids) - NUM_SHOWN} more" if len(ids) > NUM_SHOWN else ""
        parts.append(f"{who}: groups {', '.join(map(str, ids[:NUM_SHOWN]))}{more}")
    return "; ".join(parts)
