"""Memory: a leak of 20 MB a step is found, the noise of an allocator is not; ranks of a kind hold alike."""

import pytest
from stepped import MB, StepEngine, stepped

from vime.align.checks.memory import CHECK, ROUNDS, WARM_UP, few
from vime.align.memory_ledger import Ledger, slope
from vime.errors import CheckFailed
from vime.types import Verdict


def test_a_slope_is_not_moved_by_a_jump():
    assert slope([1, 1, 1, 50, 50, 50]) == pytest.approx(49 / 4)
    assert slope([1, 1, 1, 1, 50, 1]) == 0.0
    assert slope([0, 20, 40, 60, 80, 100]) == 20.0
    assert slope([7]) == 0.0


def test_clean(tmp_path):
    bench = stepped(tmp_path)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert found.measured == f"no out-of-memory in {2 + WARM_UP + ROUNDS} rounds; largest growth 0.00 MB a round"
    assert len(bench.trainer.steps) == WARM_UP + ROUNDS
    assert found.numbers["ledger"][0] == {
        "round": 0, "phase": "sync", "process": "trainer rank 0", "kind": "rss", "bytes": 400 * MB,
    }  # fmt: skip
    assert found.numbers["plots"][0]["kind"] == "steps"
    assert len(found.numbers["plots"][0]["series"][0]["x"]) == 4 * (2 + WARM_UP + ROUNDS)


def test_a_leak_of_20_mb_a_step_on_one_rank(tmp_path):
    bench = stepped(tmp_path)
    bench.trainer.leak = 20_000_000
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.measured == "trainer rank 1 keeps 19.1 MB (rss) more after every round; 1 of 3 grow"
    assert found.evidence[0] == "trainer rank 1 takes it in phase train: +19.07 MB"


@pytest.mark.parametrize(
    "noise", [(0, 30 * MB, 0), (0, 0, 0, 0, 60 * MB, 0, 0, 0), (5 * MB, 0), (0, MB, 2 * MB, 3 * MB)]
)
def test_noise_is_no_growth(tmp_path, noise):
    bench = stepped(tmp_path)
    bench.trainer.noise = noise
    assert CHECK.run(bench).verdict == Verdict.PASS


def test_an_engine_that_grows(tmp_path):
    bench = stepped(tmp_path)

    class Growing(StepEngine):
        held = 1400 * MB

        def generate(self, *args):
            Growing.held += 20 * MB
            return super().generate(*args)

        def memory(self):
            return {"engine 0": {"rss": Growing.held}}

    bench.engine = Growing()
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.evidence[0] == "engine 0 takes it in phase generate: +20.00 MB"


def test_a_rank_that_holds_more_than_its_like(tmp_path):
    bench = stepped(tmp_path)
    bench.trainer.held["trainer rank 1"] = 600 * MB
    found = CHECK.run(bench)
    assert found.verdict == Verdict.WARN
    assert "ranks of stage 0: trainer rank 1 holds 600 MB (rss), trainer rank 0 400 MB" in found.measured


@pytest.mark.parametrize(("smaller", "larger"), [(400, 480), (10, 70)])
def test_a_fifth_more_or_a_little_more_is_no_skew(tmp_path, smaller, larger):
    bench = stepped(tmp_path)
    bench.trainer.held = {"trainer rank 0": smaller * MB, "trainer rank 1": larger * MB}
    both = {process: {"rss": held} for process, held in bench.trainer.held.items()}
    memory = dict.fromkeys(("sync", "generate", "log_probs", "train"), both)
    bench.change_first(memory=memory)
    bench.change_second(memory=memory)
    assert CHECK.run(bench).verdict == Verdict.PASS


def test_stages_of_a_pipeline_may_differ(tmp_path):
    bench = stepped(tmp_path, parallel={"pp": 2})
    bench.trainer.held["trainer rank 1"] = 600 * MB
    assert CHECK.run(bench).verdict == Verdict.PASS


def test_a_refused_step_is_measured_all_the_same(tmp_path):
    bench = stepped(tmp_path)

    def step(data):
        raise CheckFailed("sample 0/1 (0 of 5 tokens)")

    bench.trainer.step = step
    assert CHECK.run(bench).verdict == Verdict.PASS
    assert "refused" in bench.said[0]


def test_short_rounds_are_short(tmp_path):
    batch = stepped(tmp_path).second.batch
    assert len(few(batch, 2)) == 4
    long = batch.select([0, 1, 2, 3] * 100)
    assert few(long, 2).num_tokens <= 512


def test_a_ledger_of_kinds_that_not_all_have():
    ledger = Ledger([{"train": {"a": {"rss": i}, "b": {"rss": 5, "allocated": 2 * i}}} for i in range(4)])
    assert ledger.growth("a", "rss") == 1.0
    assert ledger.growth("a", "allocated") == 0.0
    assert ledger.growth("b", "allocated") == 2.0
    assert ledger.steps("allocated")[1]["a"] == [None] * 4


def test_mapped_files_that_come_back_are_no_growth():
    rounds = [{"train": {"a": {"rss": 100 + 20 * i, "private": 100}, "b": {"rss": 30 * i}}} for i in range(4)]
    assert Ledger(rounds).growing() == {("a", "private"): 0.0, ("b", "rss"): 30.0}


def test_what_grows_in_one_phase_and_is_freed_in_the_next_is_no_growth():
    rounds = [{"sync": {"a": {"rss": 100}}, "train": {"a": {"rss": 100 + 20 * i}}} for i in range(4)]
    assert Ledger(rounds).growth("a", "rss") == 0.0
