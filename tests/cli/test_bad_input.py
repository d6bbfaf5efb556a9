"""Bad input, as a user types it: one line a problem, exit code 2, no traceback, and nothing was started."""

import json
import os
import sys

import pytest
from tiny_run import make_model
from typer.testing import CliRunner

from vime.config.rules import nearest_divisors
from vime.errors import VimeError
from vime_cli.app import app

UNREADABLE = "/proc/self/mem"  # a file that root cannot read either: its first page is not mapped


def refused(*arguments):
    """The problems of ``vime train run.toml ARGUMENTS``, each on one line."""
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run", *arguments])
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert all(line.startswith(("error: ", "warning: ", "hint: ")) for line in lines), lines
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=-1", "run.seed = -1 (command line): must be >= 0"),
        (f"run.num_rollouts={10**20}", f"run.num_rollouts = {10**20} (command line): must be <= 2147483647"),
        (f"run.seed={10**20}", f"run.seed = {10**20} (command line): must be <= {2**53 - 1}"),
        ("model.path=''", 'model.path = "" (command line): must not be empty'),
        ("run.dir=''", 'run.dir = "" (command line): must not be empty'),
        ("run.name=''", 'run.name = "" (command line): must be a name for a folder'),
        ("run.name=..", 'run.name = ".." (command line): must be a name for a folder'),
        ('run.dir="a\\u0000b"', 'run.dir = "a\\u0000b" (command line): must not hold a NUL character'),
        ("rollout.engine_tp=3", "rollout.engine_tp = 3 (command line): does not divide num_attention_heads = 4"),
        ("rollout.sampling.stop_token_ids=[-1]", "rollout.sampling.stop_token_ids = -1 (command line): must be >= 0"),
        ("rollout.sampling.stop_token_ids=[128]", "rollout.sampling.stop_token_ids = [128] (command line): must be < "),
        ("cluster.ray_address=auto", 'cluster.ray_address = "auto" (command line): must be HOST:PORT or ray://'),
        ("data.prompts=prompts.jsonl", "must be a list, in square brackets"),
        ("megatron.transformer.recompute_granularity=fool", "must be one of 'full', 'selective'"),
    ],
)
def test_settings(inputs, override, message):
    (line,) = refused(override)
    assert message in line


@pytest.mark.parametrize("setting", ["model.path", "run.dir", "run.name", "debug.save_rollout_data"])
def test_names_that_no_file_system_takes(inputs, setting):
    (line,) = refused(f"{setting}={'x' * 5000}", "run.num_rollouts=1")
    assert "is too long for a path: 255 bytes a name" in line
    assert len(line) < 300


def test_a_long_name_of_a_prompt_file_and_of_a_setting(inputs):
    (line,) = refused(f"data.prompts=['{'x' * 5000}.jsonl']")
    assert "is too long for a path" in line
    (line,) = refused(f"{'x' * 5000}=1")
    assert len(line) < 400


@pytest.mark.parametrize("setting", ["run.dir=file/below", "debug.save_rollout_data=file/data_{rollout_id}.pt"])
def test_output_below_a_file(inputs, setting):
    (inputs / "file").write_text("")
    (line,) = refused(setting)
    assert line.endswith(f"(command line): {inputs}/file is a file, not a folder")


def test_output_that_this_user_may_not_write(inputs, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (line,) = refused()
    assert line.startswith('run.dir = "runs/{name}" (default): ')
    assert line.endswith("is not writable for this user")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"version": ', "tokenizer.json is no JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json holds no tokenizer"),
        ("generation_config.json", "{", "generation_config.json is no JSON object"),
        ("config.json", None, "config.json cannot be read (Input/output error)"),
        ("tokenizer.json", None, "tokenizer.json cannot be read (Input/output error)"),
        ("model.safetensors", None, "model.safetensors: "),
    ],
)
def test_half_a_model_folder(inputs, name, content, message):
    file = inputs / "model" / name
    file.unlink(missing_ok=True)
    if content is None:
        file.symlink_to(UNREADABLE)
    else:
        file.write_text(content)
    (line,) = refused()
    assert line.startswith(f'model.path = "{inputs}/model" (run.toml): {message}')


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_broken_chat_template(inputs, name):
    text = "{% for m in messages %}\n{{ m.content }"
    file = inputs / "model" / name
    file.write_text(text if name.endswith("jinja") else json.dumps({"chat_template": text}))
    (line,) = refused()
    assert line.startswith(f'model.path = "{inputs}/model" (run.toml): its chat template is broken at line 2: ')
    assert CliRunner().invoke(app, ["train", "run.toml", "--dry-run", "data.apply_chat_template=false"]).exit_code == 0


def test_a_chat_template_with_tags_of_transformers(inputs):
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}"
    (inputs / "model" / "chat_template.jinja").write_text(text)
    assert CliRunner().invoke(app, ["train", "run.toml", "--dry-run"]).exit_code == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "abc"),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 0),
        ("vocab_size", 1.5),
        ("rope_theta", "abc"),
    ],
)
def test_a_config_json_of_wrong_values(inputs, key, value):
    config = json.loads((inputs / "model" / "config.json").read_text())
    (inputs / "model" / "config.json").write_text(json.dumps({**config, key: value}))
    found = refused()
    assert all(line.startswith("model.path = ") for line in found)
    if key != "rope_theta":
        assert f"config.json has {key} = {value!r}: must be an integer >= 1" in found[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a\\ud800b", "label": "1"}', "line 1: holds half a surrogate pair"),
        (b'{"prompt": "1", "label": ' + b"1" * 5000 + b"}", "line 1: invalid JSON: Exceeds the limit"),
        (b'{"prompt": "1", "label": NaN}', "line 1: label: nan is no label"),
        (b"", "no rows in"),
    ],
)
def test_prompt_files(inputs, content, message):
    (inputs / "bad.jsonl").write_bytes(content)
    (line,) = refused("data.prompts=['bad.jsonl']")
    assert message in line


def test_a_pair_of_surrogates_is_a_character(inputs):
    (inputs / "good.jsonl").write_text('{"prompt": "\\ud83d\\ude42", "label": "1"}')
    result = CliRunner().invoke(app, ["train", "run.toml", "data.prompts=['good.jsonl']", "--dry-run"])
    assert result.exit_code == 0, result.stderr


def test_prompts_that_cannot_be_read(inputs):
    (inputs / "mem.jsonl").symlink_to(UNREADABLE)
    (inputs / "folder.jsonl").mkdir()
    found = refused("data.prompts=['mem.jsonl', 'folder.jsonl']")
    assert found[0].endswith("mem.jsonl line 1: cannot be read: Input/output error")
    assert found[1].endswith("folder.jsonl: is a folder; name the files in it")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('first\\nsecond')", "import failed: RuntimeError: first second (looked for in"),
        ("import sys; sys.exit(0)", "import failed: SystemExit: 0"),
        ("def f(:", "import failed: SyntaxError"),
    ],
)
def test_a_reward_module_that_fails_while_it_is_imported(inputs, source, message):
    name = f"bad_reward_{abs(hash(source))}"
    (inputs / f"{name}.py").write_text(source)
    (line,) = refused("reward.name=user", f"reward.function={name}:f")
    assert message in line


@pytest.mark.parametrize("folder", ["none", "file", ""])
def test_resume_of_what_is_no_run(inputs, folder):
    (inputs / "file").write_text("")
    result = CliRunner().invoke(app, ["train", "--resume", str(inputs / folder)])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == (
        f"error: --resume {inputs / folder}: is no run folder (it has no config.toml)"
    )


def test_a_byte_order_mark(inputs):
    (inputs / "run.toml").write_bytes(b"\xef\xbb\xbf" + (inputs / "run.toml").read_bytes())
    assert refused() == ["run.toml: starts with a byte order mark; save it as UTF-8 without one"]


def test_a_broken_tokenizer_is_a_usage_error(inputs):
    """What only transformers can judge is found while the run starts, and is no fault of ours."""
    from vime.data import load_tokenizer

    make_model(inputs / "other")
    with pytest.raises(VimeError, match=r"no tokenizer in .*other"):
        load_tokenizer(str(inputs / "other"))


def test_an_absurd_batch_is_answered_at_once(inputs):
    """The nearest valid values of a product of two large numbers, without trying every number below it."""
    assert nearest_divisors(2**60, 3) == [1, 2, 4, 8]
    assert nearest_divisors(97, 50) == [1, 97]
    (line,) = refused("rollout.rollout_batch_size=2000000000", "train.num_steps_per_rollout=7")
    assert "nearest valid num_steps_per_rollout: " in line
