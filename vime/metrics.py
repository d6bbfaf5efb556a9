"""Names of all metrics with their formulas, and the sinks they are written to. A name that is not here is refused.

One row per rollout: ``{"rollout_id": 3, "train/loss": ...}``. Means are over trained tokens (loss mask True) of the
whole rollout unless said otherwise; log-probs are in nats, after temperature. p: policy as the trainer computes it
before the first optimizer step, r: as the engine sampled, ref: reference model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from vime.errors import UsageError, VimeError
from vime.files import whole_file

METRICS: dict[str, str] = {
    "rollout_id": "number of the rollout, from 0; of an evaluation: the weight version it was made with",
    "train/loss": "sum(loss_weight * loss) / normalizer, mean over the optimizer steps that were not skipped",
    "train/pg_loss": "policy-gradient part of train/loss",
    "train/kl_loss": "mean of the chosen estimator of KL(policy || ref), before kl_coef",
    "train/entropy": "mean entropy of the policy's next-token distribution, nats",
    "train/ppo_kl": "mean(old log-prob - new log-prob), nats; exactly 0 in the first step of a rollout",
    "train/ppo_kl_abs": "mean(|old log-prob - new log-prob|), nats: 0 only where every ratio is exactly 1",
    "train/pg_clipfrac": "share of trained tokens whose ratio was clipped",
    "train/pg_clipfrac_lower": "share of trained tokens bounded by the dual clip; with algo.dual_clip alone",
    "train/grad_norm": "global L2 norm of the gradient before clipping, mean over the steps that were not skipped",
    "train/lr": "learning rate of the last optimizer step",
    "train/num_skipped_steps": "optimizer steps of this rollout that were skipped, weights unchanged",
    "train/train_rollout_logprob_abs_diff": "mean(|p - r|), nats",
    "train/train_rollout_logprob_abs_diff/max": "max(|p - r|), nats",
    "rollout/log_probs": "mean(p)",
    "rollout/rollout_log_probs": "mean(r)",
    "rollout/ref_log_probs": "mean(ref)",
    "rollout/kl": "mean(p - ref), nats (estimator k1); exactly 0 while policy and reference are the same weights",
    "rollout/raw_reward": "mean reward over samples, before any normalisation",
    "rollout/num_samples": "samples of the rollout",
    "rollout/num_groups": "prompts of the rollout",
    "rollout/num_tokens": "tokens of prompts and responses",
    "rollout/num_response_tokens": "tokens of responses",
    "rollout/truncated_ratio": "share of samples that ended at the length limit",
    "rollout/zero_spread_group_share": "share of the groups with rewards in which all are equal: they give no gradient",
    "rollout/num_reward_timeouts": "samples whose reward ran out of time: their reward is reward.score_on_timeout",
    "rollout/repetition": "share of samples whose response repeats itself",
    "eval/reward": "mean reward over evaluation samples that have one",
    "eval/best_reward": "mean over prompts of the reward of the best sample",
    "eval/response_len": "mean response length of evaluation samples, tokens",
    "eval/truncated_ratio": "share of evaluation samples that ended at the length limit",
    "eval/num_samples": "evaluation samples",
    "eval/num_prompts": "evaluation prompts that got an answer",
    "perf/step_time": "seconds of the whole turn of the loop",
    "perf/generate_time": "seconds of generation, rewards included",
    "perf/log_probs_time": "seconds of the forwards of policy and reference",
    "perf/train_time": "seconds of the optimizer steps",
    "perf/sync_time": "seconds of the weight sync",
    "perf/eval_time": "seconds of an evaluation",
    "perf/other_time": "perf/step_time less all phases",
    "perf/tokens_per_second": "rollout/num_tokens / perf/step_time",
    "perf/generate_tokens_per_second": "rollout/num_response_tokens / perf/generate_time; not for recorded rollouts",
    "perf/train_tokens_per_second": "rollout/num_tokens / perf/train_time",
    "weights/version": "version of the weights that the engines hold",
    "weights/num_bytes": "bytes sent to each engine in the last sync",
    "weights/num_compared": "tensors whose digests were compared in the last sync, see weights.verify",
    "weights/verify_time": "seconds spent on digests in the last sync, part of perf/sync_time",
}
"""Name -> formula and unit."""

PREFIXES: dict[str, str] = {
    "rollout/response_len/": "response length in tokens: mean, min, max, median, p95",
    "rollout/prompt_len/": "prompt length in tokens: mean, min, max",
    "rollout/reward/": "reward over samples: std, min, max",
    "rollout/dropped/": "samples or groups left out, counted by cause",
    "rollout/zero_std/": "count_R: groups whose rewards all equal R",
    "rollout/status/": "samples by status",
    "eval/": "of eval.prompts; of the evaluation set NAME the same under eval/NAME/. pass_at_K: mean over prompts of "
    "1 - C(n-c, K) / C(n, K), c of n samples having a reward >= eval.pass_reward; K = 1, 2, 4, ... up to n. "
    "dropped/CAUSE: prompts left out, by cause",
}
"""Families of names: prefix -> what they hold."""


def is_known(name: str) -> bool:
    return name in METRICS or any(name.startswith(prefix) and name != prefix for prefix in PREFIXES)


class Sink(Protocol):
    """Somewhere metrics go."""

    def write(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Hands every row to all sinks. Closed on leaving a ``with`` block."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = list(sinks)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write one row; numbers only, ``rollout_id`` among them. VimeError for a name or a value that is no metric."""
        if "rollout_id" not in row:
            raise VimeError("a row of metrics has no rollout_id")
        unknown = [name for name in row if not is_known(name)]
        if unknown:
            raise VimeError(f"unknown metrics: {', '.join(unknown)}", "add the name and its formula to vime/metrics.py")
        numbers = {name: _number(name, value) for name, value in row.items()}
        for sink in self.sinks:
            sink.write(numbers)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonlSink:
    """One JSON object per line, flushed. Not-finite values are the strings "nan", "inf" and "-inf" (JSON has none)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens for appending; a last line that a killed process left unfinished is cut off."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_unfinished_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, row: Mapping[str, float]) -> None:
        """Appends the line, whole or not at all. VimeError if the system refuses to write."""
        line = json.dumps({k: _json_value(v) for k, v in row.items()}, allow_nan=False).encode("utf-8") + b"\n"
        start = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(start)
            raise VimeError(f"{self.path} cannot be written: {error.strerror}", "check the disk") from error

    def truncate_after(self, rollout_id: int) -> int:
        """Removes the rows of later rollouts, which a resumed run writes again. Returns how many; atomic."""
        self._file.close()
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["rollout_id"] <= rollout_id]
        with whole_file(self.path) as file:
            file.writelines(line.encode() for line in kept)
        self._file = self.path.open("ab", buffering=0)
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files; the step is the rollout id. Loads no torch."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """UsageError where tensorboard is not installed."""
        try:
            from tensorboard.summary import Writer
        except ModuleNotFoundError as error:
            raise _not_installed("log.tensorboard = true", "tensorboard", "cpu") from error
        self._writer = Writer(os.fspath(folder))

    def write(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "rollout_id":
                self._writer.add_scalar(name, value, step=int(row["rollout_id"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; the step is the rollout id."""

    def __init__(self, project: str, name: str, folder: str | os.PathLike[str]) -> None:
        """UsageError where wandb is not installed."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _not_installed(f'log.wandb_project = "{project}"', "wandb", "wandb") from error
        self._run = wandb.init(project=project, name=name, dir=os.fspath(folder))

    def write(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["rollout_id"]))

    def close(self) -> None:
        self._run.finish()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of a metrics file, with "nan" and "inf" as the floats they stand for."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [{name: _from_json(value) for name, value in json.loads(line).items()} for line in lines]


def _cut_unfinished_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)


def _number(name: str, value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VimeError(f"metric {name} = {value!r}: must be a number")
    return value


def _json_value(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _from_json(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


def _not_installed(setting: str, package: str, extra: str) -> UsageError:
    return UsageError(f"{setting}: {package} is not installed", f"pip install 'vime[{extra}]'")
