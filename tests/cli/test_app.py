import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vime_cli.app import app

HEAVY = ("numpy", "torch", "ray", "vllm", "megatron", "transformers")


def vime(*arguments):
    return CliRunner().invoke(app, list(arguments))


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def loaded_modules(*arguments):
    """Top-level modules a fresh process has loaded after ``vime ARGUMENTS``."""
    code = (
        "import sys\nsys.argv = ['vime', *sys.argv[1:]]\nfrom vime_cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('|'.join(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    return set(done.stderr.splitlines()[-1].split("|"))


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["align-check", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    assert not loaded_modules(*arguments) & {*HEAVY}


def test_the_first_help_does_not_even_load_pydantic():
    assert "pydantic" not in loaded_modules("--help")


def test_help_names_the_six_commands():
    result = vime("--help")
    assert result.exit_code == 0
    for name in ("train", "rollout", "replay", "align-check", "dump-weights", "debug-attach"):
        assert name in result.stdout
    assert "to come" not in result.stdout


def test_version_reads_metadata():
    result = vime("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith("vime 0.")
    assert "ray " in result.stdout


def test_where_a_page_of_weights_goes_is_known_before_they_are_taken(inputs):
    result = vime("dump-weights", "run.toml", "--html", "nowhere/page.html")
    assert result.exit_code == 2, result.output
    assert errors(result) == ["error: --html nowhere/page.html: there is no folder nowhere"]


def test_all_problems_at_once_one_line_each(inputs):
    result = vime(
        "train",
        "run.toml",
        "train.lrr=1e-6",
        "train.lr=fast",
        "train.global_batch_size=9",
        "rollout.sampling.temperature=0",
        "model.path=nowhere",
        "debug.save_rollout_data=data.pt",
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    found = errors(result)
    for start in (
        "train.lrr = 1e-06 (command line): unknown setting; did you mean train.lr?",
        'train.lr = "fast" (command line): must be a number',
        "train.global_batch_size = 9 (command line): rollout_batch_size x num_samples_per_prompt must equal",
        "rollout.sampling.temperature = 0 (command line): must be > 0 for training",
        'debug.save_rollout_data = "data.pt" (command line): needs {rollout_id}',
    ):
        assert sum(line.startswith(f"error: {start}") for line in found) == 1, (start, found)
    (path,) = [line for line in found if line.startswith("error: model.path = ")]  # a long value is cut
    assert path.endswith("(command line): no such folder")
    assert len(found) == 6


@pytest.mark.parametrize(
    "wrong",
    [
        "train.lr",
        "no.toml",
        "train.lr=-1",
        "parallel.tp=3",
        "run.num_rollouts=0",
        "data.prompts=[]",
        "model.path=none.x",
    ],
)
def test_bad_input_exits_with_2(inputs, wrong):
    result = vime("train", "run.toml", wrong)
    assert result.exit_code == 2
    assert errors(result)


def test_without_arguments_the_required_settings_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = vime("train")
    assert result.exit_code == 2
    assert [line.split(" ")[1] for line in errors(result)] == ["model.path:", "data.prompts:"]


def test_unknown_option_exits_with_2():
    assert vime("train", "--nonesuch").exit_code == 2


def test_print_config_shows_every_value_with_its_origin(inputs):
    (inputs / "more.toml").write_text("[train]\nlr = 2e-6\n")
    result = vime("train", "run.toml", "more.toml", "rollout.rollout_batch_size=4", "--print-config", "--json")
    assert result.exit_code == 0
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert rows["run.num_rollouts"]["origin"] == "run.toml"
    assert (rows["train.lr"]["value"], rows["train.lr"]["origin"]) == (2e-6, "more.toml")
    assert (rows["rollout.rollout_batch_size"]["value"], rows["rollout.rollout_batch_size"]["origin"]) == (
        4,
        "command line",
    )
    assert (rows["train.global_batch_size"]["value"], rows["train.global_batch_size"]["origin"]) == (32, "derived")
    assert rows["train.adam_beta1"]["origin"] == "default"
    assert all(row["doc"] for row in rows.values())


def test_print_config_table_and_problems(inputs):
    result = vime("train", "run.toml", "train.lrr=1", "--print-config")
    assert result.exit_code == 2
    assert "run.num_rollouts" in result.stdout
    assert "did you mean train.lr?" in result.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(inputs):
    result = vime("train", "run.toml", "parallel.pp=2", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "8 prompts x 8 samples = 64 samples per rollout" in result.stdout
    assert "layers 2-3" in result.stdout
    assert "KiB" in result.stdout
    assert result.stdout.endswith("nothing was started\n")
    assert sorted(p.name for p in inputs.iterdir()) == ["model", "prompts.jsonl", "run.toml"]


def test_dry_run_as_json(inputs):
    result = vime("train", "run.toml", "--dry-run", "--json")
    found = json.loads(result.stdout)
    assert found["is_started"] is False
    assert [row["process"] for row in found["memory"]] == ["trainer, stage 0", "engine"]


def test_what_a_users_module_prints_is_no_result(inputs):
    """By itself and by a child process: stdout is the JSON alone."""
    text = (
        "import os\nprint('loud')\nos.system('echo louder')\nasync def generate(engine, prompt, seeds, sampling): ...\n"
    )
    (inputs / "loud.py").write_text(text)
    command = [sys.executable, "-m", "vime_cli", "rollout", "run.toml", "rollout.generate=loud:generate"]
    done = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["is_started"] is False
    assert {"loud", "louder"} <= set(done.stderr.splitlines())


@pytest.mark.parametrize(("stdout", "code", "said"), [(">&-", 0, ""), (">/dev/full", 3, "error: stdout cannot be")])
def test_a_stdout_that_takes_nothing(inputs, stdout, code, said):
    command = f"{sys.executable} -m vime_cli rollout run.toml --dry-run --json {stdout}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


def test_dry_run_loads_no_library(inputs):
    assert not loaded_modules("train", "run.toml", "--dry-run") & {"torch", "ray", "vllm", "megatron", "transformers"}


def test_the_guides_four_options(inputs):
    rows = print_config("train", "run.toml", "--debug-rollout-only", "--save-debug-rollout-data", "d_{rollout_id}.pt")
    assert rows["debug.rollout_only"] == (True, "command line")
    assert rows["debug.save_rollout_data"] == ("d_{rollout_id}.pt", "command line")
    rows = print_config("train", "run.toml", "--load-debug-rollout-data", "d_{rollout_id}.pt")
    assert rows["debug.train_only"] == (True, "derived")
    result = vime("train", "run.toml", "--debug-train-only")
    assert result.exit_code == 2
    assert "needs debug.load_rollout_data" in result.stderr


def test_rollout_and_replay_are_short_forms(inputs):
    rows = print_config("rollout", "run.toml", "--save", "d_{rollout_id}.pt", "-n", "2")
    assert rows["debug.rollout_only"][0] is True
    assert rows["run.num_rollouts"] == (2, "command line")
    assert rows["debug.save_rollout_data"][0] == "d_{rollout_id}.pt"
    rows = print_config("replay", "run.toml", "--load", 'a"é_{rollout_id}.pt', "--ray-address", "127.0.0.1:6379")
    assert rows["debug.load_rollout_data"][0] == 'a"é_{rollout_id}.pt'
    assert rows["cluster.ray_address"][0] == "127.0.0.1:6379"


def test_replay_without_records_names_the_setting(inputs):
    result = vime("replay", "run.toml")
    assert result.exit_code == 2
    assert "needs debug.load_rollout_data" in result.stderr


def test_resume_reads_the_run_folder_and_refuses_a_fresh_start(inputs):
    result = vime("train", "--resume", "runs/none")
    assert result.exit_code == 2
    assert errors(result) == ["error: --resume runs/none: is no run folder (it has no config.toml)"]


def test_existing_output_is_refused(inputs):
    (inputs / "runs" / "run").mkdir(parents=True)
    (inputs / "runs" / "run" / "config.toml").write_text("")
    (inputs / "runs" / "run" / "metrics.jsonl").write_text('{"rollout_id": 0}\n')
    result = vime("train", "run.toml", "--dry-run")
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr


def test_a_run_that_got_nowhere_does_not_block_its_folder(inputs):
    (inputs / "runs" / "run").mkdir(parents=True)
    (inputs / "runs" / "run" / "config.toml").write_text("")
    (inputs / "runs" / "run" / "metrics.jsonl").write_text("")
    assert vime("train", "run.toml", "--dry-run").exit_code == 0


def print_config(*arguments):
    result = vime(*arguments, "--print-config", "--json")
    assert result.exit_code == 0, result.stderr
    return {row["path"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}
