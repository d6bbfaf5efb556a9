import os

import pytest

from vime.config.load import read
from vime.config.rules import nearest_divisors

BASE = ["model.path=m", "data.prompts=['a.jsonl']"]
RECORD = "debug.load_rollout_data=d_{rollout_id}.pt"


def lines(*overrides):
    loaded = read([], [*BASE, *overrides])
    return list(loaded.problems), list(loaded.warnings)


def problem(*overrides):
    found, _ = lines(*overrides)
    assert len(found) == 1, found
    return found[0]


def is_good(*overrides):
    return lines(*overrides)[0] == []


def test_the_defaults_are_good():
    assert lines() == ([], [])


def test_t01_too_few_samples_for_one_batch_names_all_numbers_and_the_way_out():
    line = problem("run.num_rollouts=2", "train.global_batch_size=256")
    for text in ("256", "8 x 8 = 64", "256 x 1 = 256", "2 rollouts has 128 samples", "or rollout_batch_size = 32"):
        assert text in line
    assert "64 (num_steps_per_rollout 1)" in line


def test_t02_the_rule_with_the_numbers_filled_in_and_the_nearest_valid_values():
    line = problem("rollout.rollout_batch_size=4", "rollout.num_samples_per_prompt=3", "train.global_batch_size=8")
    assert line.startswith(
        "train.global_batch_size = 8 (command line): rollout_batch_size x num_samples_per_prompt must equal "
        "global_batch_size x num_steps_per_rollout, but 4 x 3 = 12 and 8 x 1 = 8"
    )
    assert "12 (num_steps_per_rollout 1)" in line
    assert "6 (num_steps_per_rollout 2)" in line
    assert is_good("rollout.rollout_batch_size=4", "rollout.num_samples_per_prompt=3", "train.global_batch_size=12")


def test_the_suggested_values_are_valid():
    size = ["rollout.rollout_batch_size=4", "rollout.num_samples_per_prompt=3"]
    assert is_good(*size, "train.global_batch_size=6", "train.num_steps_per_rollout=2")


def test_steps_that_do_not_divide_the_samples():
    line = problem("train.num_steps_per_rollout=3")
    assert "4, " in line
    assert "must divide" in line
    assert "8 x 8 = 64 samples" in line
    assert nearest_divisors(64, 3) == [1, 2, 4, 8]


def test_more_ranks_than_samples_per_step():
    line = problem("parallel.dp=3", "train.num_steps_per_rollout=32")
    assert line.startswith("parallel.dp = 3")
    assert "parallel.dp <= 2" in line
    assert is_good("parallel.dp=3")  # 64 samples over 3 ranks: packing balances them


def test_recorded_rollouts_bring_their_own_number_of_samples():
    assert is_good(RECORD, "train.global_batch_size=5")
    assert is_good("debug.rollout_only=true", "train.global_batch_size=5")


@pytest.mark.parametrize(
    "override",
    [
        "temperature=0",
        "top_p=0.9",
        "top_k=20",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "presence_penalty=0.1",
        "frequency_penalty=0.1",
        "min_response_len=2",
    ],
)
def test_sampling_is_neutral_for_training_and_free_for_generation(override):
    line = problem(f"rollout.sampling.{override}")
    assert line.startswith(f"rollout.sampling.{override.replace('=', ' = ')} (command line): must be ")
    assert "for training" in line
    assert is_good(f"rollout.sampling.{override}", "debug.rollout_only=true")


def test_negative_temperature_is_never_right():
    assert "must be >= 0" in problem("rollout.sampling.temperature=-1", "debug.rollout_only=true")


def test_no_rollouts_evaluates_once_or_is_refused():
    line = problem("run.num_rollouts=0")
    assert line.startswith("run.num_rollouts = 0 (command line): evaluates once and exits, but there is no evaluation")
    for evaluation in ("eval.prompts=['e.jsonl']", "eval.sets.hard.prompts=['e.jsonl']"):
        assert is_good("run.num_rollouts=0", evaluation)
        assert is_good("run.num_rollouts=0", evaluation, "debug.rollout_only=true")
    line = problem("run.num_rollouts=0", "debug.rollout_only=true")
    assert "set eval.prompts or [eval.sets.NAME], or num_rollouts >= 1 to generate" in line


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["debug.train_only=true"], "debug.train_only = true (command line): needs debug.load_rollout_data"),
        (["debug.rollout_only=true", RECORD], "debug.rollout_only = true (command line): contradicts"),
        (["rollout.sampling.top_k=-1", "debug.rollout_only=true"], "0 means all tokens"),
        (
            ["rollout.sampling.min_response_len=300", "debug.rollout_only=true"],
            "must be <= rollout.sampling.max_response_len = 256",
        ),
        (["rollout.max_context_len=32", "data.max_prompt_len=32"], "must be > data.max_prompt_len = 32"),
        (["reward.name=user"], 'reward.name = "user" (command line): needs reward.function'),
        (["reward.name=user", "reward.function=nocolon"], "must read 'package.module:attribute'"),
        (["rollout.generate=a.b"], "must read 'package.module:attribute'"),
        (["reward.name=format"], "needs reward.pattern"),
        (["reward.name=format", "reward.pattern='('"], "is no regular expression"),
        (["reward.pattern=abc"], "needs a group"),
        (["data.label_key=none"], "set data.label_key"),
        (["reward.score_on_timeout=nan"], "must be a finite number"),
        (["eval.interval=2"], "eval.interval = 2 (command line): needs eval.prompts"),
        (["train.num_warmup_steps=5", "run.num_rollouts=2", "train.num_steps_per_rollout=2"], "2 x 2 = 4"),
        (["train.min_lr=1e-3"], "must be <= train.lr = 1e-06"),
        (["parallel.vpp=2"], "needs parallel.pp >= 2"),
        (["parallel.vpp=1", "parallel.pp=2"], "must be >= 2"),
        (["parallel.num_layers_in_first_stage=1"], "needs parallel.pp >= 2"),
        (["parallel.sequence_parallel=true"], "needs parallel.tp >= 2"),
        (["parallel.ep=2"], "ep x etp = 2 x 1 must divide tp x cp x dp = 1"),
        (["parallel.ep=4", "parallel.dp=2"], "parallel.ep = 4 (command line): ep x etp = 4 x 1 must divide"),
        (["parallel.ep=2", "parallel.dp=2", "parallel.etp=2"], "parallel.etp = 2 (command line): ep x etp = 2 x 2"),
        (["debug.save_rollout_data=d.pt", "run.num_rollouts=3"], "for example d_{rollout_id}.pt"),
        (["debug.save_rollout_data=d_{step}.pt"], "the only field is {rollout_id}"),
        (["debug.save_rollout_data=d_{rollout_id.pt"], "is no valid template"),
        (["debug.save_rollout_data=d_{}.pt"], "is no valid template"),
        (["debug.load_rollout_data=d.pt", "run.num_rollouts=3"], "would be read 3 times"),
        ([RECORD, "debug.save_rollout_data=d_{rollout_id}.pt"], "recorded rollouts are not recorded again"),
    ],
)
def test_settings_that_contradict_each_other(overrides, text):
    assert text in problem(*overrides)


def test_a_literal_record_path_is_good_for_one_rollout():
    assert is_good("debug.save_rollout_data=d.pt", "run.num_rollouts=1")
    assert is_good("debug.save_rollout_data=d_{rollout_id:05d}.pt", "run.num_rollouts=3")


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["rollout.num_samples_per_prompt=1"], "rollout.num_samples_per_prompt = 1"),
        (["reward.function=a:b"], "reward.function"),
        (["reward.per_group=true"], "reward.per_group"),
        (["reward.pattern='(a)'", "reward.name=math"], "reward.pattern"),
        (["model.ref_path=r", "algo.log_ref=false"], "model.ref_path"),
        (["eval.prompts=['e']", "eval.interval=1", "eval.num_samples_per_prompt=4"], "eval.num_samples_per_prompt"),
        (["train.min_lr=1e-7"], "train.min_lr"),
        (["eval.prompts=['e']", RECORD], "eval.prompts"),
        (["checkpoint.keep=2"], "checkpoint.keep"),
        (["algo.kl_coef=0.1", "algo.kl_estimator=k1"], "algo.kl_estimator"),
        (["cluster.colocate=true", "debug.rollout_only=true"], "cluster.colocate"),
    ],
)
def test_what_is_ignored_or_hardly_meant_is_a_warning(overrides, path):
    found, warned = lines(*overrides)
    assert found == []
    assert [line.startswith(path) for line in warned] == [True]


HARD = "eval.sets.hard.prompts=['h.jsonl']"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["eval.sets.eval.prompts=['e']"], "eval.sets.eval (command line): the name of an evaluation set is"),
        (["eval.sets.dropped.prompts=['e']"], "eval.sets.dropped (command line): the name"),
        (["eval.sets.a-b.prompts=['e']"], "eval.sets.a-b (command line): the name"),
        (["eval.sets.1st.prompts=['e']"], "eval.sets.1st (command line): the name"),
        ([f"eval.sets.{'x' * 65}.prompts=['e']"], f"eval.sets.{'x' * 65} (command line): the name"),
        ([HARD, "eval.sets.hard.top_k=-1"], "eval.sets.hard.top_k = -1 (command line): must be >= 0"),
        (["eval.sets.hard.prompts=['']"], 'eval.sets.hard.prompts = [""] (command line): must not be empty'),
    ],
)
def test_what_an_evaluation_set_must_be(overrides, start):
    assert problem(*overrides).startswith(start)


def test_any_set_is_an_evaluation():
    assert is_good("eval.interval=2", HARD)
    assert problem("eval.interval=2").endswith("needs eval.prompts or [eval.sets.NAME]")
    assert problem("eval.interval=2", "eval.sets.hard=3") == "eval.sets.hard = 3 (command line): must be a table"


def test_what_a_set_ignores_or_repeats_is_said_of_that_set():
    many = ["eval.sets.warm={prompts=['w'], temperature=1.0, num_samples_per_prompt=4}", HARD]
    _, found = lines(*many, "eval.sets.hard.num_samples_per_prompt=4")
    (line,) = found
    assert line.startswith("eval.sets.hard.num_samples_per_prompt = 4 (command line): greedy samples of one prompt")
    _, found = lines(HARD, "eval.num_samples_per_prompt=4")
    (line,) = found
    assert line.startswith("eval.num_samples_per_prompt = 4 (command line): greedy samples")
    assert "the temperature of evaluation set hard is 0" in line
    assert [w for w in lines(*many, RECORD)[1] if "is ignored: no engine" in w] == [
        'eval.sets.warm.prompts = ["w"] (command line): is ignored: no engine is started for recorded rollouts'.replace(
            '"w"', f'"{os.path.abspath("w")}"'
        ),
        f'eval.sets.hard.prompts = ["{os.path.abspath("h.jsonl")}"] (command line): '
        "is ignored: no engine is started for recorded rollouts",
    ]


def test_records_of_no_rollout():
    _, found = lines("run.num_rollouts=0", HARD, "debug.rollout_only=true", "debug.save_rollout_data=d_{rollout_id}.pt")
    assert [w.endswith("is ignored: there is no rollout (run.num_rollouts is 0)") for w in found] == [True]
