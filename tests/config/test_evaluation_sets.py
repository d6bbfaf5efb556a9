"""[eval.sets.NAME]: typed like every other table, though the user chooses the names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.load import load, read, to_toml
from vime.config.names import field_of, general, paths_of
from vime.config.schema import EvalSet
from vime.config.show import rows
from vime.errors import ConfigError

BASE = 'model.path = "model"\ndata.prompts = ["a.jsonl"]\n'
HARD = '[eval.sets.hard]\nprompts = ["h.jsonl"]\n'


def problems(files, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    return list(caught.value.problems)


def test_files_and_key_value_join_and_paths_are_relative_to_the_file_that_names_them(write, tmp_path):
    files = [write(BASE + HARD, "a/run.toml"), write('eval.sets.easy.prompts = ["../e.jsonl@[0:4]"]\n', "b/more.toml")]
    loaded = load(files, ["eval.sets.hard.temperature=0.6", "eval.sets.hard.top_k=none"])
    assert loaded.config.eval.sets == {
        "hard": EvalSet(prompts=[str(tmp_path / "a" / "h.jsonl")], temperature=0.6),
        "easy": EvalSet(prompts=[str(tmp_path / "e.jsonl@[0:4]")]),
    }
    origins = [loaded.origin(f"eval.sets.hard.{name}") for name in ("prompts", "temperature", "top_p")]
    assert origins == ["run.toml", "command line", "default"]


def test_what_is_not_given_is_inherited(write):
    file = write(BASE + "[eval]\nprompts = ['p.jsonl']\ntemperature = 0.5\nmax_prompts = 9\n" + HARD + "top_p = 0.9\n")
    loaded = load([file], ["rollout.sampling.max_response_len=7", "eval.sets.hard.max_response_len=70"])
    sets = loaded.config.evaluation_sets
    plain, hard = ({name: value for name, value in sets[s] if name != "prompts"} for s in ("eval", "hard"))
    shared = {"num_samples_per_prompt": 1, "temperature": 0.5, "top_k": 0, "max_prompts": 9}
    assert plain == shared | {"top_p": 1.0, "max_response_len": 7}
    assert hard == shared | {"top_p": 0.9, "max_response_len": 70}
    assert loaded.config.longest_response == 70


def test_every_setting_of_every_set_is_shown_with_what_it_comes_to(write):
    shown = {r.path: (r.value, r.origin) for r in rows(load([write(BASE + HARD + "temperature = 0.5\n")]))}
    assert shown["eval.sets.hard.temperature"] == (0.5, "run.toml")
    assert shown["eval.sets.hard.max_response_len"] == (256, "derived")
    assert shown["eval.sets.hard.max_prompts"] == (None, "default")
    assert "eval.sets" not in shown
    without = {r.path: (r.value, r.origin, r.doc) for r in rows(load([write(BASE)]))}
    assert without["eval.sets"][:2] == ({}, "default")
    assert without["eval.sets"][2]
    assert [path for path in without if "*" in path] == []


def test_all_problems_of_all_sets_at_once(write):
    file = write(BASE + HARD + "temprature = 1\nzzz = 2\n[eval.sets.easy]\ntop_p = 2.0\n[eval.sets.b]\nprompts = 3\n")
    found = problems([file], "eval.sets.hard.temperature=nan", "eval.sets.c=4")
    expected = [
        "eval.sets.hard.temprature = 1 (run.toml): unknown setting; did you mean eval.sets.hard.temperature?",
        "eval.sets.hard.zzz = 2 (run.toml): unknown setting; known in eval.sets.hard: prompts, num_samples",
        "eval.sets.hard.temperature = nan (command line): must be a finite number",
        "eval.sets.easy.prompts: required and not set (Prompt files, ",
        "eval.sets.easy.top_p = 2 (run.toml): must be <= 1",
        "eval.sets.b.prompts = 3 (run.toml): must be a list",
        "eval.sets.c = 4 (command line): must be a table",
    ]
    assert len(found) == len(expected)
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)


def test_a_set_of_a_wrong_form_is_no_set(write):
    assert problems([write(BASE)], "eval.sets=3") == ["eval.sets = 3 (command line): must be a table"]
    assert problems([write(BASE)], "eval=3") == ["eval = 3 (command line): must be a table"]
    assert read([write(BASE)], ["eval=3"]).config.evaluation_sets == {}
    assert problems([write(BASE + "[[eval.sets.hard]]\n")]) == ["eval.sets.hard = [{}] (run.toml): must be a table"]
    assert "eval.sets.a.b.prompts" in problems([write(BASE + '[eval.sets."a.b"]\nprompts = ["x"]\n')])[0]


def test_names_of_settings():
    assert general("eval.sets.hard.top_p") == "eval.sets.*.top_p"
    assert general("eval.sets.hard") == "eval.sets.*"
    assert general("eval.prompts") == "eval.prompts"
    assert field_of("eval.sets.hard.top_p").description == "None: as ``rollout.sampling.top_p``."
    assert field_of("eval.sets.hard") is None


def test_a_resumed_run_sees_what_changed_in_a_set(write):
    before, now = (read([write(BASE + HARD + f"temperature = {t}\n")]).config for t in (0.5, 0.6))
    assert paths_of(before) == paths_of(now)
    assert "eval.sets.hard.temperature" in paths_of(now)


SETS = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(lambda name: name not in ("eval", "dropped")),
    st.fixed_dictionaries(
        {"prompts": st.lists(st.from_regex(r"/[a-z é\"\\@\[\]:]{1,20}", fullmatch=True), min_size=1, max_size=3)},
        optional={
            "num_samples_per_prompt": st.integers(1, 1000),
            "temperature": st.floats(0, 100, allow_nan=False),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, 10**6),
            "max_response_len": st.integers(1, 10**6),
            "max_prompts": st.integers(1, 1000),
        },
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(sets=SETS)
def test_the_saved_configuration_reads_back_equal_and_in_order(tmp_path_factory, sets):
    folder = tmp_path_factory.mktemp("sets")
    config = load([], ["model.path=m", "data.prompts=['a']"]).config
    sets = {name: EvalSet.model_validate(values) for name, values in sets.items()}
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"sets": sets})})
    (folder / "config.toml").write_text(to_toml(config))
    again = load([folder / "config.toml"]).config
    normal = {n: s.model_copy(update={"prompts": again.eval.sets[n].prompts}) for n, s in sets.items()}
    assert again.eval.sets == normal
    assert list(again.eval.sets) == list(sets)
    assert to_toml(load([folder / "config.toml"]).config) == to_toml(again)
