"""PromptSource: the rows of the prompt files as token ids, epoch after epoch, in an order derived from the seed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime.config import schema
from vime.data.problems import listed
from vime.data.rows import Row, read_rows
from vime.errors import UsageError, VimeError
from vime.types import Prompt

log = logging.getLogger("vime.data")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row ready for the engine: ``text`` as the model sees it (special tokens visible), token_ids int32 [P]."""

    row: Row
    text: str
    token_ids: np.ndarray


class PromptSource:
    """DataSource over prompt files. Everything is rendered, tokenised and length-checked here, before anything starts.

    ``context_len`` is the model's longest prompt + response; it bounds the prompt to context_len - 1 where
    ``data.max_prompt_len`` is None. ``dropped`` names the prompts over the limit (``data.on_too_long = "drop"``).
    UsageError: bad rows, messages without a chat template, nothing left, a prompt over the limit ("error").
    """

    def __init__(
        self,
        data: schema.Data,
        tokenizer: Any,
        *,
        seed: int = 0,
        context_len: int | None = None,
        needs_label: bool = False,
    ) -> None:
        rendered = render(read_rows(data, needs_label), tokenizer, data.apply_chat_template)
        self._tokenizer = tokenizer
        self._seed = seed
        self._is_shuffled = data.shuffle
        limits = [data.max_prompt_len, None if context_len is None else context_len - 1]
        self.max_prompt_len = min((limit for limit in limits if limit is not None), default=None)
        self.items, self.dropped = _split_by_length(rendered, self.max_prompt_len, data.on_too_long)
        self.fingerprint = _fingerprint(self.items)
        self.epoch = 0
        self._cursor = 0
        self._next_group_id = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self.items)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; wraps into the next epoch as often as it takes."""
        prompts = []
        for _ in range(n):
            if self._cursor == len(self.items):
                self.epoch, self._cursor = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            item = self.items[self._order[self._cursor]]
            metadata = dict(item.row.metadata)
            prompts.append(Prompt(self._next_group_id, item.token_ids, item.text, item.row.label, metadata))
            self._cursor += 1
            self._next_group_id += 1
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Plain data: where the run stands in the data, and which data that is."""
        return {
            "epoch": self.epoch,
            "cursor": self._cursor,
            "next_group_id": self._next_group_id,
            "fingerprint": self.fingerprint,
            "num_prompts": len(self.items),
            "seed": self._seed,
            "shuffle": self._is_shuffled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. VimeError if it belongs to other data, another seed or another order."""
        if state["fingerprint"] != self.fingerprint:
            raise VimeError(
                f"the checkpoint belongs to other prompts: {state['num_prompts']} prompts, fingerprint "
                f"{state['fingerprint'][:12]}; now {len(self.items)}, {self.fingerprint[:12]}",
                "use the same files, slices, tokenizer and chat template, or start a new run",
            )
        for name, now in (("seed", self._seed), ("shuffle", self._is_shuffled)):
            if state[name] != now:
                field = "run.seed" if name == "seed" else "data.shuffle"
                raise VimeError(
                    f"{field} is {now}, the checkpoint was made with {state[name]}: the order would change",
                    f"set {field}={str(state[name]).lower()}",
                )
        self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._next_group_id = state["next_group_id"]
        self._order = self._order_of(self.epoch)

    def describe_first(self) -> dict[str, Any]:
        """The first prompt of epoch 0 as the model sees it: where, text with special tokens, token_ids, tokens."""
        item = self.items[self._order_of(0)[0]]
        ids = item.token_ids.tolist()
        return {
            "where": item.row.where,
            "text": item.text,
            "token_ids": ids,
            "tokens": self._tokenizer.convert_ids_to_tokens(ids),
        }

    def _order_of(self, epoch: int) -> list[int]:
        """Sorted by a hash and not by a library's generator, so that no upgrade can change the order of a run."""
        positions = range(len(self.items))
        if not self._is_shuffled:
            return list(positions)
        key = f"{self._seed}/{epoch}/"
        return sorted(positions, key=lambda i: hashlib.blake2b(f"{key}{i}".encode(), digest_size=16).digest())


def render(rows: Sequence[Row], tokenizer: Any, apply_chat_template: bool) -> list[Rendered]:
    """Rows as the model sees them. The chat template, if any, is applied once and adds the special tokens itself."""
    if apply_chat_template:
        texts = _apply_template(rows, tokenizer)
    else:
        texts = [str(row.prompt) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=not apply_chat_template)["input_ids"]
    empty = [
        f"{row.where}: the tokenizer makes no token of it" for row, ids in zip(rows, encoded, strict=True) if not ids
    ]
    if empty:
        raise UsageError(listed(empty))
    return [
        Rendered(row, text, np.array(ids, dtype=np.int32)) for row, text, ids in zip(rows, texts, encoded, strict=True)
    ]


def _apply_template(rows: Sequence[Row], tokenizer: Any) -> list[str]:
    import jinja2

    if not tokenizer.chat_template:
        raise UsageError(
            f"data.apply_chat_template: the tokenizer {tokenizer.name_or_path} has no chat template (a base model?)",
            "use the instruct model, or set data.apply_chat_template=false and give prompts as strings",
        )
    texts, problems = [], []
    for row in rows:
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        try:
            texts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except jinja2.TemplateError as error:
            problems.append(f"{row.where}: the chat template refuses it: {error}")
    if problems:
        raise UsageError(listed(problems))
    return texts


def _split_by_length(
    rendered: Sequence[Rendered], limit: int | None, on_too_long: str
) -> tuple[list[Rendered], list[str]]:
    """(kept, names of those over the limit)."""
    too_long = [item for item in rendered if limit is not None and len(item.token_ids) > limit]
    names = [f"{item.row.where}: {len(item.token_ids)} tokens, limit {limit}" for item in too_long]
    if names and on_too_long == "error":
        raise UsageError(f"prompts over data.max_prompt_len:\n{listed(names)}", "raise the limit, or on_too_long=drop")
    kept = [item for item in rendered if limit is None or len(item.token_ids) <= limit]
    if not kept:
        raise UsageError(f"every prompt is over the limit of {limit} tokens:\n{listed(names)}", "raise the limit")
    if names:
        log.info("%d of %d prompts dropped as too long:\n%s", len(names), len(rendered), listed(names))
    return kept, names


def _fingerprint(items: Sequence[Rendered]) -> str:
    """blake2b-128, hex, over token ids and label of every prompt, in file order."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(f"{len(item.token_ids)} {item.row.label!r}\n".encode("utf-8", "backslashreplace"))
        digest.update(item.token_ids.tobytes())
    return digest.hexdigest()
