"""Turns: a sample of several turns, token-exact, for ``rollout.generate`` functions with tools or environments.

What the engine sampled is never decoded and encoded again: each turn's prompt is the tokens so far, bit by bit, and
each answer must have been given to exactly them (the prefix property, checked at every turn).

    async def generate(engine, prompt, seeds, sampling):
        return await asyncio.gather(*(solve(engine, prompt, i, seed, sampling) for i, seed in enumerate(seeds)))

    async def solve(engine, prompt, index, seed, sampling):
        turns = Turns(prompt, seed, index, tokenizer=engine.tokenizer, max_response_len=sampling["max_response_len"])
        while (answer := await turns.ask(engine, sampling)) is not None and (call := CALL.search(answer.text)):
            turns.observe(result_of(call))
        return turns.sample()
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.errors import PromptTooLong, VimeError
from vime.protocols import RolloutEngine
from vime.types import Prompt, Sample, Status


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn, 0..2**53-1: the sample's own at turn 0, so that one turn alone is the plain generation.

    Later turns have others: the same seed would draw the same random numbers for tokens in like places.
    """
    if turn == 0:
        return seed
    key = f"{seed}/turn {turn}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11


class Turns:
    """The turns of one sample so far. ``num_turns`` counts the engine's answers.

    tokenizer         encodes observed text and decodes observed ids; None: observe token ids alone
    max_response_len  longest response in tokens, over all turns and observations; None: the engine's context alone
    """

    def __init__(
        self, prompt: Prompt, seed: int, index: int, *, tokenizer: Any = None, max_response_len: int | None = None
    ) -> None:
        self.start = prompt
        self.index = index
        self.first_seed = seed
        self.tokenizer = tokenizer
        self.max_response_len = max_response_len
        self.num_turns = 0
        self.status: Status | None = None
        self._tokens: list[np.ndarray] = [np.asarray(prompt.token_ids, dtype=np.int32)]
        self._masks: list[np.ndarray] = [np.zeros(len(prompt.token_ids), dtype=bool)]
        self._log_probs: list[np.ndarray] = [np.zeros(len(prompt.token_ids), dtype=np.float32)]
        self._texts: list[str] = []
        self._num_kept = 0  # parts up to the last answer, the prompt not counted
        self._versions: list[int] = []
        self._metadata = dict(prompt.metadata)

    @property
    def name(self) -> str:
        """How messages call this sample."""
        return f"sample {self.start.group_id}/{self.index}"

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [L]: prompt, answers and observations so far."""
        return np.concatenate(self._tokens)

    @property
    def prompt(self) -> Prompt:
        """What to send next: all tokens so far."""
        return replace(self.start, token_ids=self.token_ids)

    @property
    def seed(self) -> int:
        """The seed to send next."""
        return turn_seed(self.first_seed, self.num_turns)

    @property
    def room(self) -> int | None:
        """Response tokens that are left of ``max_response_len``; None where there is no such limit."""
        if self.max_response_len is None:
            return None
        return self.max_response_len - (sum(map(len, self._tokens)) - len(self.start.token_ids))

    async def ask(self, engine: RolloutEngine, sampling: Mapping[str, Any]) -> Sample | None:
        """Send all tokens so far, add the answer and return it; None where no room is left, or an answer was aborted.

        ``sampling``: fields of rollout.sampling for this turn; its ``max_response_len`` is the limit of the turn, cut
        to ``room`` (all of ``room`` where it names none). Raises PromptTooLong at the first turn alone: later, the
        sample ends there, truncated.
        """
        if self.status is not None and not self.status.is_trainable:
            return None
        if self.room is not None and self.room < 1:
            self.status = Status.TRUNCATED
            return None
        options = dict(sampling)
        if self.room is not None:
            options["max_response_len"] = min(options.get("max_response_len", self.room), self.room)
        try:
            (answer,) = await engine.generate(self.prompt, [self.seed], options)
        except PromptTooLong:
            if self.num_turns == 0:
                raise
            self.status = Status.TRUNCATED
            return None
        return self.add(answer)

    def add(self, answer: Sample) -> Sample:
        """Append the engine's answer to exactly ``prompt``, as it is; returns it.

        Raises VimeError naming sample, turn and the first position that differs where it answers something else.
        """
        self._require_prefix(answer)
        sampled = slice(answer.prompt_len, None)
        if not answer.loss_mask[sampled].all():
            at = answer.prompt_len + int(np.flatnonzero(~answer.loss_mask[sampled])[0])
            hint = "add what engine.generate returned; tokens of tools go through observe"
            raise VimeError(f"{self._turn}: token {at} of the answer was not sampled by the policy (loss_mask)", hint)
        self._append(answer.token_ids[sampled], answer.loss_mask[sampled], answer.rollout_log_probs[sampled])
        self._texts.append(answer.text)
        self._num_kept = len(self._texts)
        self._versions += [answer.weight_version_min, answer.weight_version_max]
        self._metadata |= answer.metadata  # with the reason, where the answer failed
        if self.status is None or self.status.is_trainable:
            self.status = answer.status
        self.num_turns += 1
        return answer

    def observe(self, what: str | Sequence[int] | np.ndarray) -> None:
        """Append what a tool or an environment says: no loss, log-prob 0.0. Text needs ``tokenizer``.

        Text is encoded by itself, without the special tokens that a tokenizer may put around a whole text.
        """
        if isinstance(what, str):
            if self.tokenizer is None:
                hint = "give Turns(..., tokenizer=engine.tokenizer), or observe token ids"
                raise VimeError(f"{self._turn}: text was observed, and there is no tokenizer to encode it", hint)
            ids = self.tokenizer.encode(what, add_special_tokens=False)
            text = what
        else:
            ids = [int(i) for i in what]
            text = "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)
        self._append(np.asarray(ids, dtype=np.int32), np.zeros(len(ids), bool), np.zeros(len(ids), np.float32))
        self._texts.append(text)

    def sample(self, text: str | None = None) -> Sample:
        """One Sample of all turns, up to the last sampled token: observations behind it had no answer.

        ``text``: what the reward sees; None: answers and observations, one after the other. Status is the last
        answer's, or truncated where the room ended, or that of the first answer that was aborted or failed. VimeError
        if the engine was never asked.
        """
        if self.status is None:
            raise VimeError(f"{self.name}: no answer was added", "call ask, or add the engine's answer to turns.prompt")
        kept = self._num_kept + 1
        return Sample(
            group_id=self.start.group_id,
            index=self.index,
            token_ids=np.concatenate(self._tokens[:kept]),
            prompt_len=len(self.start.token_ids),
            loss_mask=np.concatenate(self._masks[:kept]),
            rollout_log_probs=np.concatenate(self._log_probs[:kept]),
            text="".join(self._texts[: self._num_kept]) if text is None else text,
            prompt_text=self.start.text,
            label=self.start.label,
            status=self.status,
            seed=self.first_seed,
            weight_version_min=min(self._versions, default=0),
            weight_version_max=max(self._versions, default=0),
            metadata=self._metadata | {"num_turns": self.num_turns},
        )

    @property
    def _turn(self) -> str:
        return f"{self.name}, turn {self.num_turns}"

    def _append(self, ids: np.ndarray, mask: np.ndarray, log_probs: np.ndarray) -> None:
        self._tokens.append(ids)
        self._masks.append(mask)
        self._log_probs.append(log_probs)

    def _require_prefix(self, answer: Sample) -> None:
        sent, got = self.token_ids, answer.token_ids[: answer.prompt_len]
        hint = "send turns.prompt as it is, and add the answer before the next observation"
        if answer.group_id != self.start.group_id:
            text = f"the answer belongs to group {answer.group_id}, not to group {self.start.group_id}"
            raise VimeError(f"{self._turn}: {text}", hint)
        if not np.array_equal(sent, got):
            shorter = min(len(sent), len(got))
            differ = np.flatnonzero(sent[:shorter] != got[:shorter])
            at = int(differ[0]) if len(differ) else shorter
            what = f"{_token(got, at)} where {_token(sent, at)} was sent"
            text = f"the answer's {len(got)} prompt tokens are not the {len(sent)} tokens so far: from position {at} on"
            raise VimeError(f"{self._turn}: {text}, {what}", hint)


def _token(ids: np.ndarray, at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "nothing"
