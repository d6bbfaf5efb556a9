"""RecordedRollouts: rollouts from files instead of engines (replay)."""

from __future__ import annotations

from typing import Any

from vime.errors import UsageError
from vime.record.reader import read
from vime.record.template import has_placeholder, list_ids, missing_problem, template_path
from vime.types import RolloutBatch


class RecordedRollouts:
    """Rollouts over the files of ``template``. A literal path stands for the first rollout id asked for, alone.

    With ``tokenizer_digest``, a record made with another tokenizer is refused.
    """

    def __init__(self, template: str, *, tokenizer_digest: str | None = None) -> None:
        self.template = template
        self._tokenizer_digest = tokenizer_digest
        self._literal_id: int | None = None

    def ids(self) -> list[int]:
        """The rollout ids that exist; [] for a literal path."""
        return list_ids(self.template)

    def produce(self, rollout_id: int) -> RolloutBatch:
        """The recorded rollout. UsageError as in ``read``, or naming the ids that exist if there is no such file."""
        problem = missing_problem(self.template, [rollout_id])
        if problem is not None:
            raise UsageError(problem)
        path = template_path(self.template, rollout_id)
        if not has_placeholder(self.template):
            if self._literal_id not in (None, rollout_id):
                raise UsageError(
                    f"{self.template} is one record, and rollout {rollout_id} is the second that is asked for",
                    "put {rollout_id} into the name, or set run.num_rollouts=1",
                )
            self._literal_id = rollout_id
            return read(path, tokenizer_digest=self._tokenizer_digest)
        batch = read(path, tokenizer_digest=self._tokenizer_digest)
        if batch.rollout_id != rollout_id:
            raise UsageError(f"{path} holds rollout {batch.rollout_id}, its name says {rollout_id}")
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Files have no position: {}."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore; the state of live rollouts is accepted, since a replay may go on from such a run."""
