"""`vime replay --inspect` and `--diff`: cases P11, P12, P16 and R13."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
import torch
from made_records import ESCAPE, HEADER, record, sample, save
from typer.testing import CliRunner

from vime.record import write
from vime.types import RolloutBatch, Status
from vime_cli.app import app

HEAVY = {"torch", "ray", "vllm", "megatron", "transformers", "pyarrow"}


def vime(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def shown(*arguments):
    """stdout of a call that succeeds."""
    result = vime(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def data(*arguments):
    return json.loads(shown(*arguments, "--json"))


def refused(*arguments):
    """stderr of a call that is wrong usage."""
    result = vime(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def ids(found):
    return [(row["rollout_id"], row["sample"]) for row in found["samples"]]


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return save(tmp_path)


def test_one_line_per_rollout_then_what_holds_for_all_then_samples(template):
    """Case P11: text, reward, status and lengths, and no object printed raw."""
    out = shown("--inspect", template)
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    for i in range(3):
        assert [str(i), "4", "0.5", "0.5", "4", str(i)] in [line[:6] for line in lines]
    assert ["weight version", "0 (rollout 0); 1 (rollout 1); 2 (rollout 2)"] in lines
    assert ["seed", "7"] in lines
    assert ["counts", "status completed 3, dropped prompt_too_long 1"] in lines
    assert ["top_p", "0.9", "rollout.sampling"] in lines
    assert ["0", "0/1", "truncated", "1", "3", "4", "-2.503", "<s>0+1=", "answer 0"] in lines
    assert "12 of 12 samples" in lines[-1][0]
    for raw in ("tensor(", "array(", "Sample(", "dtype", "\x1b"):
        assert raw not in out


def test_one_rollout_has_all_its_statistics(template):
    out = shown("--inspect", template, "--ids", "1")
    assert re.search(r"response_len/p95 +4\n", out)
    assert re.search(r"zero_spread_group_share +0\n", out)
    assert "rollouts (" not in out


def test_a_literal_path(template):
    assert data("--inspect", "data_2.pt")["rollouts"][0]["rollout_id"] == 2


def test_where_sort_and_limit_over_all_rollouts(template):
    found = data("--inspect", template, "--where", "reward == 1 and metadata['level'] > 1", "--sort=-group_id")
    assert ids(found) == [(2, "5/1"), (2, "4/1"), (1, "3/1"), (1, "2/1")]
    assert (found["num_samples"], found["num_matching"]) == (12, 4)
    found = data("--inspect", template, "--sort", "-min_log_prob", "--limit", 3)
    assert ids(found) == [(0, "0/0"), (0, "1/0"), (1, "2/0")]
    found = data("--inspect", template, "--sort", "min_log_prob + group_id", "--limit", 2)
    assert ids(found) == [(0, "0/1"), (0, "0/0")]


def test_what_is_not_shown_is_said(template):
    last = shown("--inspect", template, "--limit", 2).splitlines()[-1]
    assert last.startswith("2 of 12 samples (all: --limit 12; one in full: --sample 0/0")


def test_samples_without_a_value_come_last_either_way(tmp_path):
    write(
        tmp_path / "x.pt",
        RolloutBatch.from_samples(0, [sample(0, 0), sample(1, 0, reward=1.0), sample(2, 0, reward=2.0)]),
    )
    assert ids(data("--inspect", tmp_path / "x.pt", "--sort", "reward")) == [(0, "1/0"), (0, "2/0"), (0, "0/0")]
    assert ids(data("--inspect", tmp_path / "x.pt", "--sort", "-reward")) == [(0, "2/0"), (0, "1/0"), (0, "0/0")]


def test_nothing_found_is_said_and_is_no_error(template):
    assert shown("--inspect", template, "--where", "reward > 5").endswith(
        "no sample of 12 matches --where reward > 5\n"
    )
    assert data("--inspect", template, "--where", "reward > 5")["samples"] == []


def test_a_metadata_key_that_no_sample_has_is_warned_about(template):
    result = vime("--inspect", template, "--where", "metadata['levle'] > 1")
    assert result.exit_code == 0
    assert result.stderr == "warning: no sample has metadata['levle']; the keys are: level\n"
    assert vime("--inspect", template, "--where", "metadata['level'] > 99").stderr == ""


def test_off_a_terminal_no_cell_is_cut_and_nothing_can_move_the_cursor(tmp_path):
    long = "x" * 3000 + ESCAPE + "\nend\u061c\u202e"
    model = {"path": ESCAPE, "tokenizer_digest": ESCAPE, ESCAPE: ESCAPE}
    one = sample(0, 0, text=long, prompt_text=long, label=ESCAPE, metadata={ESCAPE: ESCAPE})
    batch = RolloutBatch.from_samples(0, [one]).with_header(model=model, sampling={ESCAPE: 1}, counts={ESCAPE: 1})
    write(tmp_path / "x.pt", batch)
    write(tmp_path / "y.pt", record(0))
    for options in ([], ["--sample", "0/0"], ["--where", "metadata['a'] is None"], ["--diff"]):
        call = (
            ["--diff", tmp_path / "x.pt", tmp_path / "y.pt"]
            if options == ["--diff"]
            else ["--inspect", tmp_path / "x.pt", *options]
        )
        result = vime(*call)
        assert result.exit_code == (options == ["--diff"]), result.output
        assert "\\x1b]0;owned\\x07" in result.stdout
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u202e]", result.output)
        assert options == ["--diff"] or result.stdout.count("x" * 3000 + "\\x1b]0;owned\\x07") == 2


def test_text_that_no_terminal_can_print(tmp_path):
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [sample(0, 0, text="half \ud83d of a pair")]))
    assert "half \\ud83d of a pair" in shown("--inspect", tmp_path / "x.pt")
    assert data("--inspect", tmp_path / "x.pt")["samples"][0]["text"] == "half \ud83d of a pair"


def test_one_sample_in_full_off_a_terminal(template):
    result = vime("--inspect", template, "--sample", "3/1")
    out = result.stdout
    assert (
        "token ids instead of texts: /nowhere/model, the model it was made with, is not on this machine"
        in result.stderr
    )
    assert "\nprompt\n\n<s>3+1=\n" in out
    assert "'[33]' -0.01  '[34]' -0.50  '[35]' -  '[36]' -7.00" in out
    rows = [line.split() for line in out.partition("least likely tokens")[2].splitlines()]
    assert [row for row in rows if len(row) == 4][1:] == [
        ["6", "36", "'[36]'", "-7"],
        ["4", "34", "'[34]'", "-0.5"],
        ["3", "33", "'[33]'", "-0.01"],
    ]


def test_one_sample_as_data(template):
    (found,) = data("--inspect", template, "--sample", "3/1")
    assert (found["rollout_id"], found["reward"], found["token_ids"]) == (1, 1.0, [*range(30, 37)])
    assert found["response"][2] == {"position": 5, "id": 35, "text": "[35]", "log_prob": 0.0, "is_sampled": False}


def byte_tokenizer(folder):
    """One token per byte, " " and the three bytes of "日" among them; returns (model of a header, token -> id)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from vime.data.tokenizer import load_tokenizer, tokenizer_digest

    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return {"path": str(folder), "tokenizer_digest": tokenizer_digest(load_tokenizer(str(folder)))}, vocabulary


def test_token_texts_come_from_the_recorded_tokenizer_alone(tmp_path):
    model, vocabulary = byte_tokenizer(tmp_path / "model")
    one = sample(0, 0)
    one.token_ids[3:] = [vocabulary["a"], vocabulary["Ġ"], vocabulary["æ"], 9999]
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [one]).with_header(model=model))
    result = vime("--inspect", tmp_path / "x.pt", "--sample", "0/0")
    assert result.stderr == ""
    assert "'a' -0.01  ' ' -0.50  'æ' -  '[9999]' -6.00" in result.stdout
    other = {**model, "tokenizer_digest": "0" * 32}
    write(tmp_path / "y.pt", RolloutBatch.from_samples(0, [one]).with_header(model=other))
    result = vime("--inspect", tmp_path / "y.pt", "--sample", "0/0")
    assert "is another one now" in result.stderr
    assert f"'[{vocabulary['a']}]' -0.01" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--where", "rewrd < 1"], "did you mean reward?"),
        (["--where", "__import__('os')"], "is not allowed"),
        (["--sort", "-rewrd"], "--sort rewrd: unknown name rewrd"),
        (["--sort", "metadata"], "cannot be put in order"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--ids", "7"], "no file for rollout_id 7; existing ids: 0-2"),
        (["--ids", "a"], "--ids a: is no rollout id"),
        (["--sample", "3"], "--sample 3: is no sample"),
        (["--sample", "3/9"], "prompt 3 has the samples 0, 1"),
        (["--sample", "99/0"], "there is no prompt 99; 6 prompts, from 0 to 5"),
        (["--sample", "3/1", "--sort", "reward"], "--sample shows one sample"),
        (["--export", "csv"], "--export csv: is none of jsonl, parquet, html"),
        (["--export", "jsonl", "--limit", "3"], "does not go with --limit"),
        (["--export", "jsonl", "--out", "data_0.pt"], "data_0.pt exists already"),
        (["--export", "jsonl", "--out", "none/x"], "there is no folder none"),
        (["--out", "x"], "--out goes with --export"),
        (["--load", "x"], "does not go with --load"),
        (["run.toml"], "does not go with RUN.toml or settings"),
        (["--diff", "a", "b"], "does not go with --diff"),
    ],
)
def test_wrong_usage_is_one_line(template, options, says):
    found = [line for line in refused("--inspect", template, *options).splitlines() if line.startswith("error: ")]
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "options", [["--where", "True"], ["--sort", "reward"], ["--sample", "3/1"], ["--export", "html"]]
)
def test_the_options_of_a_look_need_one(options):
    assert "--inspect" in refused(*options)


def test_wrong_arguments_are_found_before_anything_is_loaded(template):
    code = (
        "import sys\nfrom vime_cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )

    def loaded(*arguments):
        command = [sys.executable, "-c", code, "replay", "--inspect", template, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return set(done.stderr.splitlines()[-1].split())

    assert not loaded("--where", "rewrd < 1") & {*HEAVY, "numpy"}
    assert not loaded("--where", "reward < 1") & HEAVY


def test_a_damaged_file_among_others_does_not_hide_them(template):
    with open("data_1.pt", "r+b") as file:
        file.truncate(900)
    result = vime("--inspect", template)
    assert result.exit_code == 2
    assert re.search(r"\n +1 +(- +){6}.*data_1\.pt", result.stdout)
    assert "8 of 8 samples" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "data_1.pt" in line
    assert "data_1.pt" in refused("--inspect", "data_1.pt")
    assert "data_1.pt" in refused("--inspect", template, "--export", "jsonl", "--out", "x.jsonl")
    assert not os.path.exists("x.jsonl")


def test_a_file_whose_name_says_another_rollout(template):
    os.rename("data_2.pt", "data_5.pt")
    assert "its name says 5" in shown("--inspect", template)


def test_an_empty_rollout(tmp_path):
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [], HEADER))
    assert shown("--inspect", tmp_path / "x.pt").endswith("\nno samples\n")


def test_fields_of_any_kind_in_upstreams_dumps(tmp_path):
    """Case P16: lists, tensors and arrays, a reward as a dict; what cannot be read is all said at once."""
    row = {
        "group_index": 3,
        "prompt": "2+5=",
        "response": "7",
        "response_length": 1,
        "status": "completed",
        "label": "7",
    }
    kinds = [[1, 2, 3], torch.tensor([1, 2, 3]), np.array([1, 2, 3])]
    rows = [row | {"tokens": k, "rollout_log_probs": k[:1] * 0 - 0.5 if i else [-0.5]} for i, k in enumerate(kinds)]
    rows[0]["reward"], rows[1]["reward"], rows[2]["reward"] = 1.0, {"score": 0.5}, torch.tensor(0.25)
    torch.save({"rollout_id": 4, "samples": rows}, tmp_path / "up.pt")
    found = data("--inspect", tmp_path / "up.pt")
    assert [r["reward"] for r in found["samples"]] == [1.0, 0.5, 0.25]
    assert [r["sample"] for r in found["samples"]] == ["3/0", "3/1", "3/2"]
    rows[0]["rollout_log_probs"], rows[2]["reward"] = None, "good"
    torch.save({"rollout_id": 4, "samples": rows}, tmp_path / "bad.pt")
    stderr = refused("--inspect", tmp_path / "bad.pt")
    assert "rollout_log_probs" in stderr
    assert "reward" in stderr


def test_groups_of_unequal_size(tmp_path):
    """Case R13: one prompt with several samples, another with one, in the table, the statistics and the exports."""
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [sample(0, 0), sample(0, 1), sample(0, 2), sample(1, 0)]))
    found = data("--inspect", tmp_path / "x.pt")
    assert ids(found) == [(0, "0/0"), (0, "0/1"), (0, "0/2"), (0, "1/0")]
    assert found["rollouts"][0]["statistics"]["rollout/num_groups"] == 2
    for kind in ("jsonl", "parquet", "html"):
        assert "4 samples written" in shown(
            "--inspect", tmp_path / "x.pt", "--export", kind, "--out", tmp_path / f"x.{kind}"
        )


def test_exports_are_named_after_the_records(template):
    assert shown("--inspect", template, "--ids", "1", "--export", "jsonl").startswith(
        "4 samples written to data_1.jsonl"
    )
    out = shown("--inspect", template, "--where", "reward == 1", "--export", "jsonl")
    assert out.startswith("6 samples that match --where reward == 1 written to data_0-2.jsonl")
    with open("data_0-2.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [(r["rollout_id"], r["group_id"], r["index"]) for r in rows] == [(g // 2, g, 1) for g in range(6)]
    assert data("--inspect", template, "--where", "reward > 9", "--export", "jsonl", "--out", "none.jsonl") == {
        "path": "none.jsonl",
        "num_samples": 0,
    }


def test_records_that_are_equal(template):
    assert shown("--diff", "data_0.pt", "data_0.pt") == "rollout 0: equal, 4 samples\n"
    assert shown("--diff", template, template).count("equal, 4 samples") == 3
    assert data("--diff", template, template, "--ids", "0:2")["is_equal"] is True


def changed(folder):
    """Rollout 0 with another temperature, and one token, one reward and one log-prob changed."""
    samples = [*record(0).samples()]
    samples[0].token_ids[5] = 99
    samples[1].reward = 0.25
    samples[2].rollout_log_probs[6] -= 0.5
    header = record(0).header
    sampling = {**header.sampling, "temperature": 0.5}
    (folder / "b").mkdir()
    write(folder / "b" / "data_0.pt", RolloutBatch.from_samples(0, samples, header).with_header(sampling=sampling))
    return f"{folder}/b/data_{{rollout_id}}.pt"


def test_planted_differences_are_shown_and_exit_with_1(template, tmp_path):
    other = changed(tmp_path)
    result = vime("--diff", template, other, "--ids", "0")
    assert result.exit_code == 1
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert ["sampling.temperature", "1.0", "0.5"] in lines
    assert ["0/0", "0.5000", "5 (response 2)", "[5]", "[99]", "0", "0"] in lines
    assert ["0/1", "1.0000", "1 -> 0.25", "0", "0"] in lines
    assert ["1/0", "1.0000", "0.5", "0.1667"] in lines
    assert lines[-1][0] == (
        "rollout 0: 3 of 4 samples differ; token match 0.8750; 1 depart, first 0/0; log-probs by up to 0.5 nats; "
        "1 rewards; header: sampling.temperature"
    )
    assert "token ids instead of texts" in result.stderr


def test_templates_of_other_ids(template, tmp_path):
    other = changed(tmp_path)
    result = vime("--diff", template, other, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["only_one_side"] == [f"only in A: {tmp_path}/data_{i}.pt" for i in (1, 2)]
    assert found["rollouts"][0]["header"] == [{"field": "sampling.temperature", "a": 1.0, "b": 0.5}]
    assert [s["name"] for s in found["rollouts"][0]["samples"]] == ["0/0", "0/1", "1/0"]
    os.rename(tmp_path / "b" / "data_0.pt", tmp_path / "b" / "data_8.pt")
    assert "no rollout id is on both sides" in refused("--diff", template, other)
    assert vime("--diff", "data_0.pt", other).exit_code == 1


def test_a_diff_of_what_is_not_there(template):
    assert "no such file" in refused("--diff", "data_0.pt", "data_9.pt")
    assert "does not go with --where" in refused("--diff", "data_0.pt", "data_1.pt", "--where", "True")


def on_terminal(*arguments, columns=100, lines=60, **environment):
    """What a terminal receives, and the exit code."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    unset = ("NO_COLOR", "COLUMNS", "LINES", "PAGER", "LESS", "FORCE_COLOR", "CI")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, "-m", "vime_cli", "replay", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.DEVNULL,
        env={**kept, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    out = b""
    try:
        while part := os.read(parent, 65536):
            out += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(parent)
    return out.decode().replace("\r\n", "\n"), process.wait(60)


def test_on_a_terminal_tokens_are_coloured_and_lines_fit(template, tmp_path):
    out, code = on_terminal("--inspect", template, "--sample", "3/1")
    assert code == 0
    assert re.search(r"\x1b\[1;37;45m\[36\]", out)  # the unlikely one
    assert re.search(r"\x1b\[37;100m\[35\]", out)  # the tool's
    assert "p < 0.01" in out
    out, code = on_terminal("--inspect", template, lines=200)
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, plain.splitlines())) <= 100
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [sample(12345, 0, text="long " * 99)]))
    out, code = on_terminal("--inspect", tmp_path / "x.pt", lines=200)
    (line,) = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines() if "12345/0 " in line]
    assert line.startswith(" 12345/0  completed       -       3         4     -2.17  <s>12345+0=  long long")
    assert line.endswith("…")
    assert len(line) <= 100


def test_no_color_and_dumb_terminals_get_no_escape_codes(template):
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        out, code = on_terminal("--inspect", template, "--sample", "3/1", **environment)
        assert code == 0
        assert "\x1b" not in out
        assert "'[36]' -7.00" in out


def test_a_pager_only_for_what_is_longer_than_the_screen(template, tmp_path):
    pager = f"tee {tmp_path / 'paged'}"
    out, code = on_terminal("--inspect", template, lines=200, PAGER=pager)
    assert (code, (tmp_path / "paged").exists()) == (0, False)
    out, code = on_terminal("--inspect", template, lines=20, PAGER=pager)
    assert code == 0
    assert (tmp_path / "paged").read_text(encoding="utf-8") == out
    assert "12 of 12 samples" in out


def test_a_reader_that_leaves_early_is_no_error(template):
    command = [sys.executable, "-m", "vime_cli", "replay", "--inspect", template]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_thousands_of_samples_are_columns_and_no_objects(tmp_path, monkeypatch):
    """Case P11: what is not shown is never made a Sample, nor a row."""
    from vime.record.fields import Fields
    from vime.types import Sample

    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, [sample(i, 0, reward=i % 7 / 7) for i in range(5000)]))
    made = []
    row = Fields.row
    monkeypatch.setattr(Sample, "__post_init__", lambda self: made.append("sample"))
    monkeypatch.setattr(Fields, "row", lambda self, i: made.append("row") or row(self, i))
    found = data(
        "--inspect", tmp_path / "x.pt", "--where", "reward > 0.5 and 'answer' in text", "--sort", "-mean_log_prob"
    )
    assert (found["num_matching"], len(found["samples"])) == (2142, 20)
    assert made == ["row"] * 20


def test_every_status_has_its_place(tmp_path):
    rows = [sample(i, 0, status=status) for i, status in enumerate(Status)]
    write(tmp_path / "x.pt", RolloutBatch.from_samples(0, rows))
    assert [row["status"] for row in data("--inspect", tmp_path / "x.pt")["samples"]] == [*Status]
