"""`vime dump-weights` for real: every view bitwise equal, a fault named where it is planted, dumps that others load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import Command, vime

VIEWS = ("checkpoint", "trainer", "engine-received", "engine-held")


@pytest.fixture(scope="module")
def views(workspace: Path) -> tuple[Command, Path]:
    """All four views in one start, trainer and engine split over two ranks each."""
    out = workspace / "dumps" / "split"
    layout = ("parallel.tp=2", "rollout.engine_tp=2")
    command = vime("dump-weights", workspace / "run.toml", *layout, "--out", out)
    return command, out


@pytest.fixture(scope="module")
def swapped(workspace: Path) -> tuple[Command, Path]:
    """A fresh engine without a trainer, in which two layers are swapped after it has loaded."""
    out = workspace / "dumps" / "swapped"
    asked = [option for view in ("checkpoint", "engine-received", "engine-held") for option in ("--from", view)]
    fault = 'debug.inject=["swapped-layers"]'
    command = vime("dump-weights", workspace / "run.toml", *asked, fault, "--digests-only", "--out", out)
    return command, out


def test_four_views_of_split_parts_are_bitwise_equal(views: tuple[Command, Path]) -> None:
    """Cases W07, W16, W18 and W23: out of the checkpoint, through two ranks, into two ranks, and back."""
    command, out = views
    assert command.process.returncode == 0, command.text
    assert f"{' = '.join(VIEWS)}: 47/47 tensors bitwise equal" in command.text
    assert sorted(path.name for path in out.iterdir()) == sorted([*VIEWS, *(f"{v}.manifest.json" for v in VIEWS)])
    manifests = [json.loads((out / f"{view}.manifest.json").read_text()) for view in VIEWS]
    assert len({manifest["digest"] for manifest in manifests}) == 1
    assert [len(manifest["buffers"]) > 0 for manifest in manifests] == [False, False, False, True]
    cache = [b for b in manifests[3]["buffers"] if "cos_sin_cache" in b["name"]]
    assert "Failed to load weights" not in command.text  # case W18: the verdict is the manifests'
    assert cache[0]["how"] == "non-persistent"  # case W14: in no state_dict, and seen all the same


def test_a_dump_is_a_model_that_transformers_loads(views: tuple[Command, Path], workspace: Path) -> None:
    """Case W05: logits equal those of the checkpoint."""
    import torch
    import transformers

    _, out = views
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (workspace / "model", out / "engine-held")
    )
    ids = torch.arange(3, 20)[None]
    assert torch.equal(one(ids).logits, other(ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(out / "trainer").vocab_size


def test_a_fault_in_the_live_engine_is_named(swapped: tuple[Command, Path]) -> None:
    """What entered the loader is the checkpoint; what the engine holds is not, and the layers are said."""
    command, out = swapped
    assert command.process.returncode == 1, command.text
    assert "layer 0 holds layer 2's tensors and the other way round" in command.text
    assert "weights differ: engine-held against checkpoint: " in command.text
    assert "engine-received = checkpoint" not in command.text
    assert not list(out.glob("*/"))  # digests only


def test_manifests_are_compared_offline(views: tuple[Command, Path], swapped: tuple[Command, Path]) -> None:
    split, fault = views[1], swapped[1]
    command = vime("dump-weights", "--diff", split / "trainer", fault / "engine-held.manifest.json", "--json")
    assert command.process.returncode == 1, command.text
    found = json.loads(command.text[: command.text.rindex("}") + 1])
    assert {f["kind"] for f in found["findings"]} == {"permuted layers"}
    page = split / "page.html"
    command = vime("dump-weights", "--diff", split, fault, "--html", page)
    assert command.process.returncode == 1
    assert "permuted layers" in page.read_text()
    page.unlink()
    assert vime("dump-weights", "--diff", split, split).process.returncode == 0


def test_the_map_needs_no_libraries(workspace: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = sys.argv[1:]; from vime_cli.app import app\n"
        "try: app()\nexcept SystemExit as end: code = end.code\n"
        "assert not {'torch', 'vllm', 'ray', 'megatron'} & set(sys.modules); sys.exit(code)"
    )
    layout = ("parallel.tp=2", "parallel.pp=2")
    program = (sys.executable, "-c", code)
    command = Command(("dump-weights", "--map", workspace / "run.toml", *layout), program=program)
    assert command.finish() == 0, command.text
    assert "pp 1, tp 0" in command.text
    assert "a bijection onto the checkpoint's 47 tensors" in command.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "trainr"), "is no view (did you mean trainer?)"),
        (("--from", "checkpoint", "--match", "q_prj"), "finds none of 47 names"),
        (("--from", "checkpoint", "--layer", "4"), "the model has layers 0 to 3"),
        (("--from", "checkpoint", "--map"), "--map does not go with --from"),
        (("--diff", "no", "no"), "--diff does not go with RUN.toml"),
    ],
)
def test_wrong_usage(workspace: Path, arguments: tuple[str, ...], message: str) -> None:
    command = vime("dump-weights", workspace / "run.toml", *arguments)
    assert command.process.returncode == 2, command.text
    assert message in command.text


def test_every_sync_of_a_run_is_watched(workspace: Path) -> None:
    run = (f"run.dir={workspace / 'watched'}", "run.num_rollouts=2")
    command = vime("dump-weights", "--watch", workspace / "run.toml", *run, "--json")
    assert command.process.returncode == 0, command.text
    start = command.text.index("{\n")
    syncs = json.loads(command.text[start:])["syncs"]
    assert [(s["version"], s["num_compared"], s["num_equal"]) for s in syncs] == [(0, 47, 47), (1, 5, 5), (2, 5, 5)]
    assert all(0 < s["seconds"] < s["sync_seconds"] for s in syncs)
