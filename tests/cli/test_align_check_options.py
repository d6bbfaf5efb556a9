"""``vime align-check``: what is asked, with which settings; what is wrong ends with exit code 2, before any start."""

import json

import pytest
from tiny_run import write_record
from typer.testing import CliRunner

from vime.align.checks import CHECKS
from vime.align.faults import FAULTS
from vime.config.load import read
from vime.errors import UsageError
from vime.preflight.small import Size, changed, small_walk
from vime_cli.app import app


def align_check(*arguments):
    return CliRunner().invoke(app, ["align-check", *arguments])


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith(("error: ", "hint: "))]


def test_list_names_every_check_and_every_fault_and_needs_no_run():
    found = json.loads(align_check("--list", "--json").stdout)
    assert [row["name"] for row in found["checks"]] == [check.name for check in CHECKS]
    assert all(row["guide"] and row["needs"] for row in found["checks"])
    assert [row["name"] for row in found["faults"]] == list(FAULTS)
    text = align_check("--list").stdout
    assert "known_issues" in text
    assert "dropped-tensor" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "wieghts"], "'wieghts' is no check"),
        (["--skip", "8z"], "'8z' is no check"),
        (["--size", "4x4"], "--size 4x4: is not PROMPTSxSAMPLESxTOKENS"),
        (["--size", "0x4x8"], "--size 0x4x8: is not PROMPTSxSAMPLESxTOKENS"),
        (["--inject", "droped-tensor"], "did you mean dropped-tensor?"),
        (["--family", "llama"], "--family: belongs to --self-test"),
        (["--sample", "0/1"], "--sample 0/1: belongs to --bisect"),
        (["parallel.tp=3"], "parallel.tp = 3"),
        (["--only", "8c", "--skip", "8"], "no check is left"),
        (["--only", ""], "'' names nothing"),
        (["--ids", "0:2"], "--ids 0:2: belongs to --from-record"),
        (["--bisect", "--only", "weights"], "--bisect does not go with --only"),
        (["--bisect", "--sample", "first"], "--sample first: is not GROUP/INDEX"),
        (["--self-test"], "--self-test does not go with RUN.toml, --dry-run"),
        (["--html", "nowhere/page.html"], "--html nowhere/page.html: there is no folder nowhere"),
        (["--html", "."], "--html .: is a folder"),
        (["--inject", "top-p", "--inject", "top-p"], "top-p stands there twice"),
        (["--inject", "loss-scale"], "loss-scale needs parallel.dp >= 2"),
        (["--inject", "router-bias"], "router-bias needs a mixture of experts"),
        (["--inject", "bf16-weights", "model.dtype=bfloat16"], "bf16-weights needs model.dtype = float32"),
        (["--inject", "base-model", "data.apply_chat_template=false"], "needs data.apply_chat_template = true"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(inputs, arguments, message):
    result = align_check("run.toml", *arguments, "--dry-run")
    assert result.exit_code == 2, result.output
    assert message in "\n".join(errors(result))
    assert "settings of its own" not in result.stderr


def test_a_fault_of_engines_has_no_place_in_a_walk_over_records(inputs):
    write_record(inputs / "data_0.pt", 0)
    result = align_check("run.toml", "--from-record", "data_{rollout_id}.pt", "--inject", "top-p", "--dry-run")
    assert result.exit_code == 2, result.output
    assert "top-p is planted where engines take part" in "\n".join(errors(result))


def test_where_the_table_of_a_self_test_goes_is_known_before_it(inputs):
    result = align_check("--self-test", "--markdown", "nowhere/faults.md")
    assert result.exit_code == 2, result.output
    assert errors(result)[0] == "error: --markdown nowhere/faults.md: there is no folder nowhere"


def test_a_dry_run_says_the_settings_of_the_walk_and_starts_nothing(inputs):
    result = align_check("run.toml", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "nothing was started" in result.stdout
    assert (
        "align-check has settings of its own: run.num_rollouts 3 -> 2, rollout.rollout_batch_size 8 -> 4"
        in result.stderr
    )
    assert "runs/run-align" in result.stdout


def test_print_config_says_that_they_are_derived(inputs):
    result = align_check("run.toml", "rollout.rollout_batch_size=16", "--print-config", "--json")
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert (rows["rollout.rollout_batch_size"]["value"], rows["rollout.rollout_batch_size"]["origin"]) == (4, "derived")
    assert rows["model.path"]["origin"] == "run.toml"


def test_what_is_checked_stays_the_users(inputs):
    """Model, types, layout, kernels, sampling; and sizes that are small enough."""
    overrides = [
        "parallel.tp=2",
        "model.dtype=bfloat16",
        "rollout.sampling.temperature=0.7",
        "rollout.sampling.max_response_len=8",
        "rollout.num_samples_per_prompt=2",
        "train.lr=1e-5",
        "megatron.transformer.attention_backend=flash",
        "eval.prompts=['prompts.jsonl']",
        "checkpoint.save_interval=1",
    ]
    before = read(["run.toml"], overrides)
    derived = small_walk(before.config, Size.of("4x4x64"))
    config = read(["run.toml"], overrides, derived=derived).config
    assert (config.parallel, config.model, config.megatron) == (
        before.config.parallel,
        before.config.model,
        before.config.megatron,
    )
    assert config.rollout.sampling == before.config.rollout.sampling
    assert (config.rollout.num_samples_per_prompt, config.train.lr) == (2, 1e-5)
    assert (config.evaluation_sets, config.checkpoint.save_interval, config.algo.log_ref) == ({}, 0, True)
    assert changed(before, read(["run.toml"], overrides, derived=derived), derived) == [
        "run.num_rollouts 3 -> 2",
        "rollout.rollout_batch_size 8 -> 4",
    ]


def test_a_step_that_gives_no_number_is_never_left_out(inputs):
    """train.nan_policy = "skip" would leave every check of a step without one to judge."""
    before = read(["run.toml"], ["train.nan_policy=skip"])
    derived = small_walk(before.config, Size())
    after = read(["run.toml"], ["train.nan_policy=skip"], derived=derived)
    assert after.config.train.nan_policy == "stop"
    assert 'train.nan_policy "skip" -> "stop"' in changed(before, after, derived)


@pytest.mark.parametrize("text", ["", "axbxc", "1x2x3x4", "-1x2x3"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError):
        Size.of(text)
