import json
from pathlib import Path

import pytest
from tiny_run import make_model, write_record, write_weights

from vime.config.load import read
from vime.preflight import packages, preflight
from vime.preflight.model_folder import read_header


def check(*overrides, command="train", resume=None):
    return preflight(read([Path("run.toml")], overrides), command, resume=resume, is_dry_run=True)


def problems(*overrides, **rest):
    return check(*overrides, **rest).problems


def only(lines):
    assert len(lines) == 1, lines
    return lines[0]


def test_a_good_run_has_no_problem_and_says_what_it_is(inputs):
    found = check("parallel.pp=2", "parallel.tp=2")
    assert found.problems == []
    assert found.facts["batch"].startswith("8 prompts x 8 samples = 64 samples per rollout = 1 steps x global batch 64")
    assert found.layers == [("stage 0, ranks 0-1", "layers 0-1"), ("stage 1, ranks 2-3", "layers 2-3")]
    assert [row.process for row in found.memory] == ["trainer, stage 0", "trainer, stage 1", "engine"]


def test_interleaved_layers_are_listed_per_stage(inputs):
    found = check("parallel.pp=2", "parallel.vpp=2")
    assert found.layers == [("stage 0, rank 0", "layer 0; layer 2"), ("stage 1, rank 1", "layer 1; layer 3")]


def test_missing_model_folder(inputs):
    line = only(problems("model.path=nowhere"))
    assert line == f'model.path = "{inputs}/nowhere" (command line): no such folder'


def test_model_path_is_a_file(inputs):
    assert "is a file" in only(problems("model.path=run.toml"))


def test_half_a_model_folder_names_every_missing_part(inputs):
    (inputs / "model" / "tokenizer.json").unlink()
    (inputs / "model" / "model.safetensors").unlink()
    (inputs / "model" / "pytorch_model.bin").write_text("")
    found = problems()
    assert any("has no tokenizer" in line for line in found)
    assert any("has no *.safetensors file (it has pytorch_model.bin; convert" in line for line in found)
    (inputs / "model" / "config.json").unlink()
    assert any("has no config.json" in line for line in problems())


def test_an_unknown_family_is_refused(inputs):
    make_model(inputs / "other")
    config = json.loads((inputs / "other" / "config.json").read_text())
    (inputs / "other" / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    assert "nonesuch" in only(problems("model.path=other"))


def test_missing_and_unexpected_tensors_are_named(inputs):
    import numpy as np

    write_weights(inputs / "model", without=["model.layers.2.mlp.up_proj.weight"], extra=np.zeros(1, np.float32))
    found = problems()
    assert any("lacks 1 tensors of the model: model.layers.2.mlp.up_proj.weight" in line for line in found)
    assert any("has 1 tensors that config.json has no place for: extra" in line for line in found)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(inputs):
    import numpy as np

    name = "model.norm.weight"
    write_weights(inputs / "model", without=[name], **{name: np.zeros(65, np.float32)})
    assert "model.norm.weight [65] instead of [64]" in only(problems())


def test_truncated_weights(inputs):
    file = inputs / "model" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert f"model.safetensors: is cut off: {len(whole) - 10} bytes, {len(whole)} by its header" in only(problems())
    file.write_bytes(whole[:100])
    assert "is cut off, or no safetensors file" in only(problems())
    file.write_bytes(b"abc")
    assert read_header(file) == ({}, "model.safetensors: is cut off, or no safetensors file (3 bytes)")


@pytest.mark.parametrize("header", [b"[]", b'{"a": 3}', b'{"a": {"shape": [1]}}', b"{nonsense"])
def test_a_header_that_is_none(inputs, header):
    (inputs / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors: its header cannot be read" in only(problems())


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_file_that_is_no_json_object(inputs, name, content):
    (inputs / "model" / name).write_text(content)
    assert any(f"{name} is no JSON object" in line for line in problems())


def test_a_chat_template_of_null_is_none(inputs):
    (inputs / "model" / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert "needs a chat template" in only(problems())


def test_an_index_that_names_absent_shards(inputs):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}}
    (inputs / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 2 files that are not there: model-1.safetensors, model-2.safetensors" in only(problems())


def test_tokenizer_without_chat_template(inputs):
    (inputs / "model" / "tokenizer_config.json").write_text("{}")
    line = only(problems())
    assert line.startswith("data.apply_chat_template = true (default): needs a chat template")
    assert problems("data.apply_chat_template=false") == []
    (inputs / "model" / "chat_template.jinja").write_text("x")
    assert problems() == []


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (["parallel.tp=3"], "parallel.tp = 3", "does not divide num_attention_heads = 4"),
        (["parallel.pp=3"], "parallel.pp = 3", "does not divide num_layers = 4"),
        (["parallel.pp=2", "parallel.vpp=4"], "parallel.vpp = 4", "does not divide"),
        (["data.max_prompt_len=600"], "data.max_prompt_len = 600", "context of the model"),
        (["rollout.max_context_len=513"], "rollout.max_context_len = 513", "must be <= 512"),
        (["rollout.sampling.max_response_len=512"], "rollout.sampling.max_response_len = 512", "room for a prompt"),
        (["algo.name=ppo9"], 'algo.name = "ppo9"', "must be one of grpo"),
        (["vllm.max_num_seq=4"], "vllm.max_num_seq = 4", "did you mean vllm.max_num_seqs?"),
        (["vllm.model=x"], 'vllm.model = "x"', "is set by vime"),
        (["megatron.transformer.num_layers=2"], "megatron.transformer.num_layers = 2", "is set by vime"),
        (["data.prompts=['no.jsonl']"], "data.prompts", "no.jsonl: no such file"),
        (["eval.prompts=['no.jsonl']", "eval.interval=1"], "eval.prompts", "no.jsonl: no such file"),
        (["eval.sets.hard.prompts=['no.jsonl']"], "eval.sets.hard.prompts", "no.jsonl: no such file"),
        (
            ["eval.sets.hard={prompts=['prompts.jsonl'], max_response_len=512}"],
            "eval.sets.hard.max_response_len = 512",
            "room for a prompt",
        ),
    ],
)
def test_each_problem_names_setting_value_and_rule(inputs, overrides, path, text):
    found = problems(*overrides)
    assert any(line.startswith(path) and text in line for line in found), found


def test_a_response_over_the_context_is_a_warning(inputs):
    found = check("data.max_prompt_len=300", "rollout.sampling.max_response_len=300")
    assert found.problems == []
    assert any("= 600 is over the model's context 512" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("source", "function", "text"),
    [
        ("", "my_reward_a:score", "has no score"),
        ("def score(sample, extra): return 1.0", "my_reward_b:score", "its signature is (sample, extra)"),
        ("import nothing_of_this_name", "my_reward_c:score", "No module named 'nothing_of_this_name'"),
        ("score = 3", "my_reward_d:score", "not a function"),
        (None, "my_reward_e:score", "No module named 'my_reward_e'"),
        ("def score(sample): return 1.0", "my_reward_f:score", None),
    ],
)
def test_reward_function(inputs, source, function, text):
    if source is not None:
        (inputs / f"{function.partition(':')[0]}.py").write_text(source)
    found = problems("reward.name=user", f"reward.function={function}")
    if text is None:
        assert found == []
    else:
        line = only(found)
        assert line.startswith(f'reward.function = "{function}" (command line): ')
        assert text in line


def test_generate_function(inputs):
    (inputs / "my_generate_a.py").write_text("async def good(a, b, c, d): ...\nasync def bad(a): ...\n")
    assert problems("rollout.generate=my_generate_a:good") == []
    line = only(problems("rollout.generate=my_generate_a:bad"))
    assert line.startswith('rollout.generate = "my_generate_a:bad" (command line): ')
    assert "4 positional" in line


def test_existing_records_are_not_written_over(inputs):
    (inputs / "data_1.pt").write_text("")
    line = only(problems("debug.save_rollout_data=data_{rollout_id}.pt"))
    assert "data_1.pt exists already" in line
    assert problems("debug.save_rollout_data=data_{rollout_id}.pt", "run.overwrite=true") == []


def test_records_to_replay_must_be_there_and_those_that_are_get_listed(inputs):
    write_record(inputs / "data_0.pt", 0)
    line = only(problems("debug.load_rollout_data=data_{rollout_id}.pt", command="replay"))
    assert "no file for rollout_id 1-2; existing ids: 0" in line
    assert problems("debug.load_rollout_data=data_0.pt", "run.num_rollouts=1", command="replay") == []


def test_records_that_cannot_be_trained_on_are_refused_all_at_once(inputs):
    (inputs / "data_0.pt").write_bytes(b"PK")
    write_record(inputs / "data_1.pt", 1, num_samples=32)
    write_record(inputs / "data_2.pt", 2, reward=None)
    first, second, third = problems("debug.load_rollout_data=data_{rollout_id}.pt", command="replay")
    assert first.startswith("data_0.pt is cut short or not a rollout record")
    assert second.startswith("data_1.pt: rollout 1 has 32 samples;")
    assert second.endswith("= 64 x 1 = 64; set train.global_batch_size=32")
    assert third.startswith("data_2.pt: sample 0/0 of rollout 2 has reward nan")


def test_a_folder_that_holds_a_run(inputs):
    (inputs / "runs" / "run").mkdir(parents=True)
    assert problems() == []
    (inputs / "runs" / "run" / "config.toml").write_text("")
    assert problems() == []  # it ended before it did anything
    (inputs / "runs" / "run" / "metrics.jsonl").write_text('{"rollout_id": 0}\n')
    assert "runs/run already holds a run" in only(problems())
    assert problems("run.overwrite=true") == []
    assert problems("run.name=other") == []


def test_resume_needs_a_complete_checkpoint(inputs):
    folder = inputs / "runs" / "run"
    assert "is no run folder" in only(problems(resume="runs/run"))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text((inputs / "run.toml").read_text().replace('"model"', f'"{inputs}/model"'))
    assert "has no complete checkpoint" in only(problems(resume="runs/run"))
    half = folder / "checkpoints" / "rollout_000002"
    half.mkdir(parents=True)
    assert "has no complete checkpoint" in only(problems(resume="runs/run"))
    (half / "manifest.json").write_text("{}")
    assert problems(resume="runs/run") == []
    assert "2 rollouts behind it" in only(problems("run.num_rollouts=2", resume="runs/run"))
    assert "nothing to restore" in only(problems("debug.rollout_only=true", resume="runs/run"))


def test_resume_with_other_settings_is_said(inputs):
    folder = inputs / "runs" / "run"
    (folder / "checkpoints" / "rollout_000001").mkdir(parents=True)
    (folder / "checkpoints" / "rollout_000001" / "manifest.json").write_text("{}")
    prompts = '["' + str(inputs / "prompts.jsonl") + '"]'
    saved = (inputs / "run.toml").read_text().replace('"model"', f'"{inputs}/model"')
    (folder / "config.toml").write_text(saved.replace('["prompts.jsonl"]', prompts))
    found = check("train.lr=1e-3", resume="runs/run")
    assert found.problems == []
    assert found.warnings == ["train.lr = 0.001 (command line): differs from the run that is resumed, which had 1e-06"]
    longer = ("run.num_rollouts=9", "train.lr_schedule=linear")
    changes = "changes the learning rate from here on: the linear decay was planned over"
    assert any(changes in line for line in check(*longer, resume="runs/run").warnings)
    assert not any(changes in line for line in check(longer[0], resume="runs/run").warnings)


def test_another_architecture_is_no_reference(inputs):
    make_model(inputs / "other", num_hidden_layers=2)
    assert "of one architecture" in only(problems("model.ref_path=other"))


def test_missing_packages_are_a_problem_except_in_a_dry_run(inputs, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name not in ("vllm", "ray"))
    loaded = read([Path("run.toml")])
    line = only(preflight(loaded, "train").problems)
    assert line.startswith("vime train needs vllm, ray: not installed. Run: pip install 'vime[cpu]'")
    assert line in preflight(loaded, "train", is_dry_run=True).warnings


def test_replay_needs_neither_vllm_nor_prompts(inputs):
    (inputs / "prompts.jsonl").unlink()
    write_record(inputs / "data.pt", 0)
    loaded = read([Path("run.toml")], ["debug.load_rollout_data=data.pt", "run.num_rollouts=1"])
    assert preflight(loaded, "replay", is_dry_run=True).problems == []
    assert "vllm" not in packages.TRAINER
    assert not loaded.config.needs_engines


def test_memory_forecast_by_hand(inputs):
    trainer, engine = check("parallel.dp=2", "parallel.distributed_optimizer=true").memory
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    params = 128 * 64 + 4 * layer + 64
    assert (trainer.count, trainer.weights, trainer.gradients) == (2, params * 4, params * 4)
    assert trainer.optimizer == params * 8 // 2
    assert trainer.reference == params * 4
    assert engine.weights == params * 4
    per_token = 2 * 4 * 2 * 16 * 4  # k and v, layers, heads, head_dim, bytes
    assert engine.kv_cache == 256 * 2 * 128 * per_token  # sequences, blocks of one (64 tokens and a spare), tokens
    assert engine.total == engine.weights + engine.kv_cache


def test_the_prompts_of_every_set_are_named(inputs):
    sets = ["eval.prompts=['prompts.jsonl']", "eval.sets.hard.prompts=['prompts.jsonl@[0:4]']"]
    facts = check(*sets).facts
    assert facts["evaluation"].endswith("prompts.jsonl")
    assert facts["evaluation of hard"].endswith("prompts.jsonl@[0:4]")
