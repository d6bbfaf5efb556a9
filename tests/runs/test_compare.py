"""The verdict over two trails: what is compared, what is not and why, where the first mismatch is."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import sample

from vime.align.folders import holders_of
from vime.config.schema import Config
from vime.errors import CheckFailed, UsageError
from vime.log import Progress
from vime.models import load_spec
from vime.preflight.against import Against
from vime.record import write
from vime.record.training import TrainingHeader, TrainingRecord, TrainingStep, rollout_digest, write_training
from vime.runs.compare import Compared, Comparison, layout_line, verdict_of
from vime.runs.judge import Judge, changes
from vime.runs.trail import RecordedTrail, Trail
from vime.types import RolloutBatch, Verdict
from vime.weights.shards import written
from vime_cli import output

MODEL = {
    "model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 4, "num_hidden_layers": 2,
    "intermediate_size": 4, "vocab_size": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
TOKENIZER = SimpleNamespace(get_vocab=dict, decode=lambda ids: f"<{ids[0]}>")


@pytest.fixture
def folder(tmp_path):
    """A model's config.json, records of rollouts 0 and 1 and the training records beside them."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for i in range(2):
        write(tmp_path / f"data_{i}.pt", batch(i))
        write_training(tmp_path / f"data_{i}.train.pt", record(i))
    return tmp_path


def config(folder, **sections):
    debug = {"load_rollout_data": str(folder / "data_{rollout_id}.pt"), "train_only": True}
    base = {"model": {"path": str(folder)}, "data": {"prompts": ["a.jsonl"]}, "debug": debug}
    return Config.model_validate({**base, "run": {"num_rollouts": 2, "dir": str(folder)}, **sections})


def batch(rollout_id):
    return RolloutBatch.from_samples(rollout_id, [sample(g, 0, reward=float(g)) for g in (0, 1)])


def record(rollout_id, before="v0", **changes):
    rollout = batch(rollout_id)
    header = TrainingHeader({"parallel.tp": 1}, {"train.lr": 1.0}, {"torch": "2"}, rollout_digest(rollout), before)
    fields = {
        "header": header,
        "offsets": rollout.offsets,
        "log_probs_T": np.full(8, -1, np.float32),
        "ref_log_probs_T": np.empty(0, np.float32),
        "advantages_T": np.ones(8, np.float32),
        "sample_losses_N": np.array([0.5, 0.5]),
        "dp_ranks_N": np.zeros(2, np.int32),
        "steps": [TrainingStep(1.0, 2.0, 1e-3, 4)],
        "weights": {"model.norm.weight": "ab"},
    }
    return TrainingRecord(rollout_id, **{**fields, **changes})


def judged(folder, *candidates, ids=None, is_asked=True, reference=None, **sections):
    """(rows by rollout and quantity, verdict of them all, notes) of candidates against the records in ``folder``."""
    settings = config(folder, **sections)
    trail = SimpleNamespace(record={c.rollout_id: c for c in candidates}.get)
    ids = ids or range(len(candidates))
    judge = Judge(settings, ids, reference or RecordedTrail(settings.debug.load_rollout_data), trail, is_asked)
    judge.tokenizer = TOKENIZER
    rows = judge.rows()
    return (
        {(r.rollout_id, r.quantity): r for r in rows},
        verdict_of("replay against the recorded run", rows),
        judge.notes,
    )


def test_the_same_run_is_bitwise_and_what_a_record_does_not_hold_is_not_tested(folder):
    rows, check, notes = judged(folder, record(0), record(1))
    assert check.verdict == Verdict.PASS
    assert check.measured == "13 quantities within limits; not tested: gradients"
    assert notes == ["same layout, settings and libraries: bitwise"]
    assert rows[0, "weights"].measured == "1 of 1 digests equal"
    assert (1, "weights before") not in rows


def test_the_first_mismatch_is_the_first_quantity_of_the_first_rollout(folder):
    worse = [TrainingStep(1.0, 2.5, 1e-3, 4)]
    moved = np.full(8, -1, np.float32)
    moved[3] = -1.5
    candidates = [record(0, steps=worse, weights={"model.norm.weight": "cd"}), record(1, log_probs_T=moved)]
    _, check, _ = judged(folder, *candidates)
    assert check.verdict == Verdict.FAIL
    assert check.measured.startswith("first mismatch: rollout 0, grad_norm: 2 -> 2.5, relative 0.25")
    assert any(line.startswith("then weights: 0 of 1 digests equal") for line in check.evidence)
    _, check, _ = judged(folder, record(0), candidates[1])
    assert "rollout 1, log_probs: " in check.measured
    assert "sample 0/0 (dp rank 0), position 3, token 6 '<6>': -1 -> -1.5" in check.measured


def test_in_another_layout_digests_say_nothing_and_limits_widen_after_a_step(folder):
    other = [replace(record(i).header, layout={"parallel.tp": 2}) for i in range(2)]
    candidates = [record(i, header=other[i], weights={"model.norm.weight": "cd"}) for i in range(2)]
    rows, check, notes = judged(folder, *candidates)
    assert check.verdict == Verdict.PASS
    assert rows[0, "weights"].verdict == Verdict.NOT_TESTED
    assert notes[0] == "differs: parallel.tp 1 -> 2"
    assert (rows[0, "log_probs"].limit, rows[1, "log_probs"].limit) == ("1e-05", "0.0001")


def test_the_second_step_of_a_rollout_comes_after_an_optimizer_step_too(folder):
    two = [TrainingStep(1.0, 2.0, 1e-3, 2)] * 2
    header = replace(record(0).header, layout={"parallel.tp": 2})
    write_training(folder / "data_0.train.pt", record(0, steps=two), overwrite=True)
    rows, _, notes = judged(folder, record(0, header=header, steps=two))
    assert (rows[0, "log_probs"].limit, rows[0, "grad_norm"].limit) == ("1e-05", "0.0001 relative")
    assert notes[1:] == [
        "limits: float32 rounding, sums in another order",
        "limits: float32 rounding, sums in another order; x 10 after an optimizer step (Adam)",
    ]


def test_another_library_is_no_reason_to_ask_for_the_same_bits(folder):
    header = replace(record(0).header, library_versions={"torch": "3"})
    rows, _, notes = judged(folder, record(0, header=header))
    assert notes[0] == "differs: torch 2 -> 3"
    assert rows[0, "grad_norm"].limit == "1e-05 relative"


@pytest.mark.parametrize("is_asked", [True, False])
def test_other_settings_are_a_difference_only_where_the_comparison_was_asked_for(folder, is_asked):
    header = replace(record(0).header, settings={"train.lr": 2.0})
    candidate = record(0, header=header, steps=[TrainingStep(1.0, 2.0, 2e-3, 4)])
    rows, check, _ = judged(folder, candidate, is_asked=is_asked)
    assert check.verdict == (Verdict.FAIL if is_asked else Verdict.NOT_TESTED)
    if is_asked:
        assert rows[0, "lr"].verdict == Verdict.FAIL
    else:
        assert check.cause == "other settings than those of the recorded run: train.lr 1.0 -> 2.0"


def test_a_record_from_the_middle_of_a_run_needs_its_weights(folder):
    _, check, _ = judged(folder, record(1, before="other"), ids=range(1, 2))
    assert check.verdict == Verdict.NOT_TESTED
    assert check.cause.startswith("the recorded run had trained on 1 rollouts before")
    rows, check, _ = judged(folder, record(1), ids=range(1, 2))
    assert check.verdict == Verdict.PASS
    assert rows[1, "weights before"].verdict == Verdict.PASS


def test_at_the_start_other_weights_are_a_mismatch(folder):
    _, check, _ = judged(folder, record(0, before="other"))
    assert check.measured.startswith("first mismatch: rollout 0, weights before")


def test_a_record_by_a_literal_name_is_the_rollout_that_was_asked_for(folder):
    """Its file says rollout 1; the replay trains on it as rollout 0."""
    debug = {"load_rollout_data": str(folder / "data_1.pt"), "train_only": True}
    rows, check, _ = judged(folder, record(0), debug=debug)
    assert check.verdict == Verdict.PASS
    assert {rollout_id for rollout_id, _ in rows} == {0}
    _, check, _ = judged(folder, record(0, before="other"), debug=debug)
    assert check.cause.startswith("the recorded run had trained on 1 rollouts before")


def test_what_is_missing_or_of_another_rollout_is_said(folder):
    (folder / "data_1.train.pt").unlink()
    rows, check, _ = judged(folder, record(0), record(1))
    assert rows[1, "everything"].verdict == Verdict.NOT_TESTED
    assert check.measured.endswith("not tested: gradients, rollout 1")
    assert "there is no training record" in rows[1, "everything"].where
    assert check.verdict == Verdict.PASS
    header = replace(record(0).header, rollout_digest="other")
    write_training(folder / "data_0.train.pt", record(0, header=header), overwrite=True)
    _, check, _ = judged(folder, record(0))
    assert (check.verdict, "belongs to another rollout" in check.cause) == (Verdict.NOT_TESTED, True)


def trail(folder, name, gradient=1.0, after=1.5, with_gradients=True):
    """One rollout of a run, tensors and all."""
    made = Trail(folder / name, keeps_tensors=True)
    made.folder.mkdir()
    made.put(record(0))
    tensors = {"model.norm.weight": torch.ones(4)}
    list(written(made.weights(0), tensors.items()))
    list(written(made.weights(1), ((n, t * after) for n, t in tensors.items())))
    if with_gradients:
        list(written(made.gradients(0, 0), ((n, t * gradient) for n, t in tensors.items())))
    return made


def rows_of(folder, ours, theirs, **sections):
    judge = Judge(config(folder, **sections), range(1), ours, theirs, True)
    judge.tokenizer = TOKENIZER
    return {row.quantity: row for row in judge.rows()}


def test_tensors_on_disk_are_compared_by_name(folder):
    rows = rows_of(folder, trail(folder, "a"), trail(folder, "b", gradient=1.1, after=1.4))
    assert rows["weights before"].verdict == Verdict.PASS
    assert rows["gradients"].verdict == Verdict.FAIL
    assert rows["gradients"].where == "model.norm.weight (rank 0); clipped to 1"
    assert rows["gradients"].numbers["max relative L2"] == pytest.approx(0.1)
    assert rows["weights"].numbers["max share of the step"] == pytest.approx(0.2)


def test_other_weights_at_the_start_are_a_mismatch_wherever_it_is(folder):
    """Of two replays both start from model.path."""
    trails = []
    for name, before in (("a", "v0"), ("b", "other")):
        made = Trail(folder / name, keeps_tensors=True)
        made.folder.mkdir()
        made.put(record(1, before))
        for version in (1, 2):
            value = torch.full((4,), float(version if name == "a" else -version))
            list(written(made.weights(version), [("model.norm.weight", value)]))
        list(written(made.gradients(1, 0), [("model.norm.weight", torch.ones(4))]))
        trails.append(made)
    judge = Judge(config(folder), range(1, 2), *trails, True)
    judge.tokenizer = TOKENIZER
    check = verdict_of("replay", judge.rows())
    assert check.measured == (
        "first mismatch: rollout 1, weights before: 0 of 1 tensors equal; model.norm.weight (rank 0)"
    )


def test_a_tensor_of_one_side_alone_or_of_another_shape_is_a_mismatch(folder):
    ours, theirs = trail(folder, "a"), trail(folder, "b")
    list(written(theirs.folder / "more", [("model.other", torch.ones(2))]))
    (theirs.folder / "more" / "00000.safetensors").rename(theirs.weights(0) / "00001.safetensors")
    row = rows_of(folder, ours, theirs)["weights before"]
    assert (row.verdict, row.where) == (Verdict.FAIL, "model.other (no rank)")
    assert row.evidence == ("model.other: the reference has none",)
    other = trail(folder, "c")
    shutil.rmtree(other.weights(0))
    list(written(other.weights(0), [("model.norm.weight", torch.ones(3))]))
    row = rows_of(folder, ours, other)["weights before"]
    assert row.evidence == ("model.norm.weight: shape [4] -> [3]",)


def test_without_gradients_the_reason_is_said(folder):
    rows = rows_of(folder, trail(folder, "a"), trail(folder, "b", with_gradients=False))
    assert rows["gradients"].verdict == Verdict.NOT_TESTED
    assert "distributed_optimizer" in rows["gradients"].where


def test_the_ranks_that_hold_a_tensor(folder):
    holders = holders_of(load_spec(folder), config(folder, parallel={"tp": 2, "pp": 2}))
    assert holders("model.layers.0.mlp.up_proj.weight") == "stage 0, ranks 0-1"
    assert holders("model.norm.weight") == "stage 1, ranks 2-3"
    assert holders_of(load_spec(folder), config(folder))("model.norm.weight") == "rank 0"


def test_what_may_change_numbers():
    one = record(0).header
    assert changes(one, one) == []
    other = replace(one, layout={"parallel.tp": 1, "parallel.pp": 2}, library_versions={"torch": "2", "ray": "3"})
    assert changes(one, other) == ["parallel.pp None -> 2"]


def comparison(folder):
    loaded = SimpleNamespace(config=config(folder))
    say = Progress(1, io.StringIO(), False)
    return Comparison(Against("tp=1", (loaded,)), config(folder), range(2), folder / ".comparison", say)


def test_a_disk_without_room_for_two_trails_is_said_before_the_first_run(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(UsageError, match=r"0\.0 GB are free, gradients and weights of two runs over 2 rollouts need"):
        comparison(folder).check()


def test_what_a_killed_run_left_is_removed_and_so_is_everything_at_the_end(folder):
    made = replace(comparison(folder), against=Against("the recorded run"))
    (made.folder / "old").mkdir(parents=True)
    with made.held():
        assert not made.folder.exists()
        (made.folder / "new").mkdir(parents=True)
    assert not made.folder.exists()
    with pytest.raises(ZeroDivisionError), made.held():
        made.folder.mkdir(parents=bool(1 / 0))
    assert not made.folder.exists()


def test_a_damaged_training_record_is_refused_before_the_replay(folder):
    (folder / "data_1.train.pt").write_bytes(b"damaged")
    made = replace(comparison(folder), against=Against("the recorded run"))
    with pytest.raises(UsageError, match="cut short"):
        made.check()


def test_an_outcome_is_plain_data(folder):
    rows, check, notes = judged(folder, record(0))
    found = Compared("replay", list(rows.values()), notes, check)
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["verdict"] == "PASS"
    assert plain["rows"][1]["numbers"] == {"max": 0.0, "p99": 0.0, "mean": 0.0, "over": 0}
    assert found.table_rows()[0][:3] == ("0", "weights before", "PASS")
    assert layout_line(config(Path("m"), parallel={"tp": 2})).startswith("tp 2, pp 1, cp 1, dp 1")


def test_a_mismatch_is_printed_with_its_cause_and_what_to_try(folder, capsys):
    rows, check, notes = judged(folder, record(0, steps=[TrainingStep(1.0, 2.5, 1e-3, 4)]))
    compared = Compared("replay", list(rows.values()), notes, check)
    run = SimpleNamespace(
        summary=None, example_rows=list, comparisons=[compared], rows=list, failed_checks=[check], notes=[]
    )
    with pytest.raises(CheckFailed, match="first mismatch: rollout 0, grad_norm"):
        output.result(run, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("first mismatch: rollout 0, grad_norm"))
    assert [line.split(":")[0] for line in lines[at + 1 : at + 3]] == ["  likely", "  try"]
