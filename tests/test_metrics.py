import ast
import json
import math
import re
import resource
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import vime
from vime.errors import UsageError, VimeError
from vime.metrics import METRICS, PREFIXES, JsonlSink, Metrics, TensorBoardSink, WandbSink, is_known, read_jsonl


def test_jsonl_rows_are_valid_json_and_read_back(tmp_path):
    with Metrics([JsonlSink(tmp_path / "m.jsonl")]) as metrics:
        metrics.log({"rollout_id": 0, "train/loss": 0.5, "train/grad_norm": math.inf, "rollout/kl": math.nan})
        metrics.log({"rollout_id": 1, "train/loss": np.float32(0.25), "weights/version": np.int64(2)})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(constant)

    assert [json.loads(line, parse_constant=refuse)["rollout_id"] for line in lines] == [0, 1]
    rows = read_jsonl(tmp_path / "m.jsonl")
    assert rows[0]["train/grad_norm"] == math.inf
    assert math.isnan(rows[0]["rollout/kl"])
    assert rows[1] == {"rollout_id": 1, "train/loss": 0.25, "weights/version": 2}


def test_rows_are_on_disk_before_close(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write({"rollout_id": 0})
    assert (tmp_path / "m.jsonl").read_text() == '{"rollout_id": 0}\n'
    sink.close()


def test_a_row_that_the_disk_does_not_take_leaves_no_half_line(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    unlimited, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(VimeError, match=r"m\.jsonl cannot be written: File too large"):
            deque(sink.write({"rollout_id": rollout_id}) for rollout_id in range(9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, hard))
    sink.close()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"rollout_id": 0}, {"rollout_id": 1}]


def test_resume_drops_later_rows_and_the_torn_last_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"rollout_id": 0}\n{"rollout_id": 1}\n{"rollout_id": 2}\n{"rollou')
    sink = JsonlSink(path)
    assert sink.truncate_after(0) == 2
    sink.write({"rollout_id": 1, "train/loss": 1.0})
    sink.close()
    assert read_jsonl(path) == [{"rollout_id": 0}, {"rollout_id": 1, "train/loss": 1.0}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"rollout_id": 0, "train/los": 1.0}, "unknown metrics: train/los"),
        ({"train/loss": 1.0}, "no rollout_id"),
        ({"rollout_id": 0, "train/loss": "1.0"}, "must be a number"),
        ({"rollout_id": 0, "train/loss": None}, "must be a number"),
        ({"rollout_id": 0, "rollout/response_len/": 1.0}, "unknown metrics"),
    ],
)
def test_what_is_no_metric_is_refused(row, message):
    with pytest.raises(VimeError, match=message):
        Metrics().log(row)


def test_every_name_has_a_formula():
    assert all(text and text == text.strip() for text in (*METRICS.values(), *PREFIXES.values()))
    assert is_known("rollout/response_len/p95")
    assert not is_known("rollout/response_len")


def test_wandb_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"log\.wandb_project") as caught:
        WandbSink("project", "run", tmp_path)
    assert caught.value.hint == "pip install 'vime[wandb]'"


def test_tensorboard_writes_events_without_torch(tmp_path):
    pytest.importorskip("tensorboard")
    code = (
        "import sys; from vime.metrics import TensorBoardSink\n"
        f"sink = TensorBoardSink({str(tmp_path)!r}); sink.write({{'rollout_id': 3, 'train/loss': 0.5}}); sink.close()\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "train/loss" in str(events.Tags())


def test_tensorboard_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(UsageError, match=r"log\.tensorboard"):
        TensorBoardSink(tmp_path)


def test_every_metric_name_in_the_source_is_known():
    pattern = re.compile(r"(train|rollout|eval|perf|weights|memory)/[a-z0-9_/]*[a-z0-9_]")
    unknown = []
    for file in Path(vime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_name = isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
            if is_name and not is_known(node.value):
                unknown.append(f"{file.name}:{node.lineno} {node.value}")
    assert unknown == []
