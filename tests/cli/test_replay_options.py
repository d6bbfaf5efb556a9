"""``vime replay``: which rollouts, compared with what. What is wrong is one line and exit code 2, before any start."""

from pathlib import Path

import pytest
from tiny_run import write_record
from typer.testing import CliRunner

from vime.config.load import read
from vime.errors import UsageError
from vime.preflight.against import against, layout_overrides, rollout_ids
from vime_cli.app import app
from vime_cli.comparison import with_ids
from vime_cli.options import call

RECORDS = "data_{rollout_id}.pt"


@pytest.fixture
def recorded(inputs):
    """Four records; rollouts 0 and 1 have training records beside them."""
    for i in range(4):
        write_record(inputs / f"data_{i}.pt", i)
    for i in range(2):
        (inputs / f"data_{i}.train.pt").write_bytes(b"")
    return inputs


def replay(*arguments):
    return CliRunner().invoke(app, ["replay", "run.toml", "--load", RECORDS, "--dry-run", *arguments])


def refused(*arguments):
    """The only error line."""
    result = replay(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_ids_say_where_to_begin_and_to_end(recorded):
    result = replay("--ids", "1:3")
    assert result.exit_code == 0, result.output
    assert "rollouts 1-2, 2 of the 4 recorded" in result.stdout
    asked = with_ids(call("replay", ["run.toml", f"debug.load_rollout_data={RECORDS}"], {}), "2", None)
    assert (asked.start, asked.overrides[-1]) == (2, "run.num_rollouts=3")


def test_more_records_than_rollouts_are_counted(recorded):
    assert "rollouts 0-2, 3 of the 4 recorded" in replay().stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "2:9"], "no file for rollout_id 4-8; existing ids: 0-3"),
        (["--ids", "x"], "--ids x: is no rollout id and no range"),
        (["--ids", "3:1"], "--ids 3:1: names no rollout; existing ids: 0-3"),
        (["--ids", "0", "-n", "2"], "both say which rollouts"),
        (["--repeat", "1"], "--repeat 1: must be >= 2"),
        (["--repeat", "2", "--vs", "tp=1"], "compares the replay with itself, not with --vs tp=1"),
        (["--vs", "tq=2"], "'tq=2' is no KEY=VALUE of a layout; keys: tp, pp"),
        (["--vs", "run.num_rollouts=9"], "run.num_rollouts: a reference may differ in parallel.*, train.*, "),
        (["--vs", "tp=1,debug.load_rollout_data=x.pt"], "debug.load_rollout_data: a reference may differ in"),
        (["--vs", "tp"], "'tp' is no KEY=VALUE of a layout"),
        (["--vs", "parallel.tq=2"], "--vs parallel.tq=2: parallel.tq"),
        (["--vs", "tp=8"], "--vs tp=8: parallel.tp = 8"),
        (["--vs", "pp=3"], "does not divide num_layers = 4"),
        (["--vs", "tp=two"], "--vs tp=two: parallel.tp"),
        (["--inject", "loss-scale"], "loss-scale needs parallel.dp >= 2"),
        (["--inject", "shard-order", "parallel.dp=2"], "shard-order needs parallel.tp >= 2"),
        (["--inject", "nan-weight"], "nan-weight is planted in the engines, and vime replay starts none"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(recorded, arguments, message):
    assert message in refused(*arguments)


def test_the_recorded_run_needs_training_records_of_every_rollout(recorded):
    assert replay("--vs", "RECORD", "--ids", "0:2").exit_code == 0
    assert "no file for rollout_id 2; existing ids: 0-1" in refused("--vs", "record", "--ids", "1:3")
    for i in range(2):
        (recorded / f"data_{i}.train.pt").unlink()
    line = refused("--vs", "RECORD", "--ids", "0")
    assert line.startswith("error: --vs RECORD needs training records: ")
    assert "data_{rollout_id}.train.pt: no file for rollout_id 0; there is no file for any id" in line
    assert "--inject loss-scale without --vs needs training records" in refused(
        "--inject", "loss-scale", "parallel.dp=2"
    )


def test_ids_need_records(inputs):
    result = CliRunner().invoke(app, ["replay", "run.toml", "--ids", "0"])
    assert result.exit_code == 2
    assert "error: --ids 0: there are no saved rollouts to choose from" in result.stderr


def of(vs=None, repeat=None, *overrides):
    overrides = (f"debug.load_rollout_data={RECORDS}", *overrides)
    return against(read([Path("run.toml")], overrides), [Path("run.toml")], overrides, vs, repeat)


def test_the_reference_is_the_replay_in_another_layout_without_the_fault(recorded):
    found = of("pp=2,max_tokens_per_micro_batch=64", None, "parallel.dp=2", 'debug.inject=["loss-scale"]')
    (reference,) = found.references
    assert reference.config.parallel.pp == 2
    assert reference.config.parallel.dp == 2
    assert reference.config.train.max_tokens_per_micro_batch == 64
    assert reference.config.debug.inject == []


@pytest.mark.parametrize("name", ["1", "one"])
def test_one_is_a_single_process(recorded, name):
    (reference,) = of(name, None, "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true").references
    assert reference.config.parallel.world_size == 1
    assert not reference.config.parallel.sequence_parallel


def test_repeated_runs_are_all_the_same_replay(recorded):
    found = of(None, 3, "parallel.tp=2")
    assert [r.config.parallel.tp for r in found.references] == [2, 2]


def test_without_a_wish_training_records_are_compared_with_where_there_are_any(recorded):
    assert of().references == ()
    assert not of().is_asked
    assert of("RECORD", None, "run.num_rollouts=2").is_asked
    for i in range(2):
        (recorded / f"data_{i}.train.pt").unlink()
    assert of() is None


def test_names_of_a_layout():
    assert layout_overrides("tp=1, dtype=bfloat16") == ["parallel.tp=1", "model.dtype=bfloat16"]
    assert layout_overrides("train.lr=1e-3") == ["train.lr=1e-3"]
    with pytest.raises(UsageError, match="is no KEY=VALUE"):
        layout_overrides("")


def test_rollouts_with_a_gap_do_not_follow_one_another(tmp_path):
    for i in (0, 1, 3):
        (tmp_path / f"data_{i}.pt").write_bytes(b"")
    template = str(tmp_path / RECORDS)
    assert rollout_ids(template, "0:2") == range(2)
    with pytest.raises(UsageError, match="do not follow one another"):
        rollout_ids(template, "0:")


def test_one_file_has_no_ids_to_choose(tmp_path):
    (tmp_path / "data_1.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="is one file; ids need") as refusal:
        rollout_ids(str(tmp_path / "data_1.pt"), "1")
    assert "--num-rollouts 1" in str(refusal.value.hint)
