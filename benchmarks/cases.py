"""The models and requests that the benchmarks share: those of the examples, so that anybody can make them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.schema import Config
from vime.errors import UsageError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True, slots=True)
class Case:
    """One example model, and how much to ask of it.

    num_prompts x group_size samples of ``response_len`` tokens each; ``context_len`` bounds prompt and response.
    """

    name: str
    num_prompts: int
    group_size: int
    response_len: int
    context_len: int

    @property
    def folder(self) -> Path:
        return EXAMPLES / self.name

    @property
    def title(self) -> str:
        return f"{self.name}, {self.num_prompts * self.group_size} x {self.response_len} tokens"

    def config(self, **sections: dict[str, Any]) -> Config:
        """float32, one rank, one engine, reward ``format``. UsageError where the model has not been made yet."""
        if not (self.folder / "model" / "config.json").exists():
            raise UsageError(
                f"{self.folder / 'model'} does not exist", f"python examples/{self.name}/make_model.py makes it"
            )
        sampling = {"max_response_len": self.response_len, "ignore_stop": True}
        base: dict[str, Any] = {
            "run": {"num_rollouts": 1000},
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "data": {"prompts": [str(self.folder / "prompts.jsonl")]},
            "rollout": {
                "rollout_batch_size": self.num_prompts,
                "num_samples_per_prompt": self.group_size,
                "max_context_len": self.context_len,
                "sampling": sampling,
            },
            "reward": {"name": "format", "pattern": ".*"},
        }
        return Config.model_validate({**base, **sections})


QUICKSTART = Case("quickstart", num_prompts=8, group_size=8, response_len=32, context_len=128)
TINY = Case("tiny", num_prompts=32, group_size=8, response_len=64, context_len=128)
