import math
from pathlib import Path

import pytest

from vime.config.load import load, read, to_toml
from vime.config.message import short, toml_value
from vime.config.names import free_tables, settings, suggest
from vime.config.show import rows
from vime.errors import ConfigError

BASE = 'model.path = "model"\ndata.prompts = ["a.jsonl"]\n'


def problems(files, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    return list(caught.value.problems)


def test_later_files_win_and_tables_join(write):
    first = write(BASE + "[train]\nlr = 1e-3\nweight_decay = 0.1\n")
    second = write("[train]\nlr = 2e-3\n", "more.toml")
    loaded = load([first, second], ["train.clip_grad=inf", "run.name=42"])
    assert (loaded.config.train.lr, loaded.config.train.weight_decay) == (2e-3, 0.1)
    assert loaded.config.train.clip_grad == math.inf
    assert loaded.config.run.name == "42"
    origins = {p: loaded.origin(p) for p in ("train.lr", "train.weight_decay", "train.clip_grad", "train.adam_eps")}
    assert list(origins.values()) == ["more.toml", "run.toml", "command line", "default"]


def test_paths_are_relative_to_the_file_that_names_them(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    first = write(BASE + 'model.ref_path = "/abs/ref"\nrun.dir = "out/{name}"\n', "a/run.toml")
    second = write('eval.prompts = ["../e.jsonl@[0:4]"]\n', "b/more.toml")
    config = load([first, second], ["data.prompts=['x.jsonl']"]).config
    assert config.model.path == str(tmp_path / "a" / "model")
    assert config.model.ref_path == "/abs/ref"
    assert config.eval.prompts == [str(tmp_path / "e.jsonl@[0:4]")]
    assert config.data.prompts == [str(elsewhere / "x.jsonl")]
    assert config.run_dir == "out/run"


def test_base_dir_is_the_folder_of_the_first_file(write, tmp_path):
    assert load([write(BASE, "a/run.toml"), write("", "b/more.toml")]).base_dir == tmp_path / "a"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.lrr=1e-6", "train.lrr = 1e-06 (command line): unknown setting; did you mean train.lr?"),
        ("trian.lr=1e-6", "trian.lr = 1e-06 (command line): unknown setting; did you mean train.lr?"),
        ("lr=1", "lr = 1 (command line): unknown setting; did you mean train.lr?"),
        ("rollout.n_samples_per_prompt=4", "did you mean rollout.num_samples_per_prompt?"),
        ("temperature=1", "did you mean rollout.sampling.temperature or eval.temperature?"),
        ("train.zzz=1", "train.zzz = 1 (command line): unknown setting; known in train: lr, lr_schedule"),
        ("zzz=1", "zzz = 1 (command line): unknown setting; known tables: run, model, data"),
        ("train.lr.x=1", "train.lr.x = 1 (command line): unknown setting; did you mean train.lr?"),
        ('train.lr="fast"', 'train.lr = "fast" (command line): must be a number'),
        ("train.lr=0", "train.lr = 0 (command line): must be > 0"),
        ("train.lr=nan", "train.lr = nan (command line): must be a finite number"),
        ("train.lr=inf", "train.lr = inf (command line): must be a finite number"),
        ("parallel.tp=0", "parallel.tp = 0 (command line): must be >= 1"),
        ("parallel.tp=2.0", "parallel.tp = 2 (command line): must be an integer, not 2.0"),
        ("parallel.tp=true", "parallel.tp = true (command line): must be an integer"),
        ("train.adam_beta1=1", "train.adam_beta1 = 1 (command line): must be < 1"),
        ("train.nan_policy=go", "train.nan_policy = \"go\" (command line): must be one of 'stop' or 'skip'"),
        ("data.shuffle=1", "data.shuffle = 1 (command line): must be true or false"),
        ("data.prompts=[]", "data.prompts = [] (command line): must not be empty"),
        ("data.prompts=[1]", "data.prompts = 1 (command line): must be a string"),
        ("train=3", "train = 3 (command line): must be a table"),
        ("vllm=3", "vllm = 3 (command line): must be a table"),
        ("run.name=[1", None),
        ("nonsense", "nonsense"),
        ("a b=1", "neither a .toml file nor KEY=VALUE"),
    ],
)
def test_every_wrong_value_gets_one_line(write, override, line):
    if line is None:  # no TOML, so a bare string
        assert load([write(BASE)], [override]).config.run.name == "[1"
    else:
        found = problems([write(BASE)], override)
        assert len(found) == 1
        assert line in found[0]


def test_all_problems_at_once(write):
    file = write("[train]\nlrr = 1\nlr = -1\nglobal_batch_size = 9\n[rollout]\nnum_samples_per_prompt = 4\n")
    found = problems([file], "rollout.sampling.temperature=0", "eval.interval=2")
    starts = ["train.lrr", "model.path: required", "data.prompts: required", "train.lr = -1 (run.toml)"]
    starts += ["train.global_batch_size", "rollout.sampling.temperature = 0 (command line)", "eval.interval"]
    assert len(found) == len(starts)
    for start in starts:
        assert any(line.startswith(start) for line in found), (start, found)


def test_rules_do_not_judge_a_value_that_was_refused(write):
    found = problems([write(BASE)], "rollout.rollout_batch_size=eight", "train.global_batch_size=9")
    assert found == ['rollout.rollout_batch_size = "eight" (command line): must be an integer']


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[train]\nlr = \n", "not valid TOML: Invalid value (at line 2, column 6)"),
        ("a = [1,\n\n", "at line 1, the end of the file"),
        ("a = 1\na = 2\n", "not valid TOML"),
    ],
)
def test_a_broken_file_names_line_and_column(write, text, problem):
    file = write(text)
    found = problems([file, Path("missing.toml")])
    assert found[0].startswith(f"{file}: ")
    assert problem in found[0]
    assert found[1] == "missing.toml: no such file"


def test_none_is_spelled_none_where_a_setting_admits_it(write):
    config = load([write(BASE)], ["data.label_key=none", "reward.name=format", "reward.pattern=x"]).config
    assert config.data.label_key is None
    assert config.rollout.group_filter == "none"


def test_load_rollout_data_sets_train_only(write):
    loaded = load([write(BASE)], ["debug.load_rollout_data=d_{rollout_id}.pt"])
    assert loaded.config.debug.train_only
    assert loaded.origin("debug.train_only") == "derived"
    assert "must be true with debug.load_rollout_data" in " ".join(
        problems([write(BASE)], "debug.load_rollout_data=d_{rollout_id}.pt", "debug.train_only=false")
    )


def test_free_tables_keep_the_libraries_names(write):
    file = write(BASE + "[vllm]\nmax_num_seqs = 3\n[vllm.compilation_config]\nmode = 0\n")
    loaded = load([file], ["vllm.compilation_config.mode=3", "megatron.transformer.moe_permute_fusion=true"])
    assert loaded.config.vllm == {"max_num_seqs": 3, "compilation_config": {"mode": 3}}
    assert loaded.config.megatron.transformer == {"moe_permute_fusion": True}
    assert free_tables() == ("megatron.transformer", "megatron.optimizer", "megatron.ddp", "vllm")
    assert {r.path: r.origin for r in rows(loaded)}["vllm.compilation_config.mode"] == "command line"


def test_a_table_replaced_by_a_value_and_back(write):
    file = write(BASE + "[vllm.compilation_config]\nmode = 0\n")
    assert load([file], ["vllm.compilation_config=3"]).config.vllm == {"compilation_config": 3}
    both = load([file], ["vllm.compilation_config=3", "vllm.compilation_config.level=1"])
    assert both.config.vllm == {"compilation_config": {"level": 1}}


def test_the_saved_configuration_reads_back_equal(write):
    overrides = ["train.clip_grad=inf", "train.lr=1e-06", "reward.pattern='a\"\\\\(b)\\n'", "run.name=é\x7f"]
    overrides += ["data.label_key=none", "reward.name=user", "reward.function=a:b", "vllm.x={a=[1, 2.5], b=true}"]
    loaded = load([write(BASE)], overrides)
    saved = write(to_toml(loaded.config), "out/config.toml")
    assert load([saved]).config == loaded.config


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-6, "1e-06"),
        (0.0, "0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (None, '"none"'),
        (True, "true"),
        ([1, "a"], '[1, "a"]'),
    ],
)
def test_values_are_shown_as_typed(value, text):
    assert short(value) == text


def test_floats_are_saved_exactly():
    assert toml_value(1e-6) == "1.0e-06"
    assert toml_value(-math.inf) == "-inf"


def test_every_setting_has_a_docstring():
    assert [path for path, field in settings().items() if not field.description] == []


def test_nothing_near_is_no_suggestion():
    assert suggest("qqqqqq") is None


def test_reading_never_raises_for_wrong_values(write):
    loaded = read([write("")], ["train.lr=x", "model=3"])
    assert {"train.lr", "model", "data.prompts"} <= loaded.invalid
    assert loaded.config.train.lr == 1e-6
