"""The search over a runner of our own: every shape of a crash, found in a bounded number of engine starts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from vime.debug.crash.found import Found, Plan
from vime.debug.crash.ledger import Ledger, repeats_for
from vime.debug.crash.report import NOT_REPRODUCED, CrashReport, Request
from vime.debug.crash.search import search
from vime.debug.crash.toggles import axes, check_axes, chosen, overlaid, toggles
from vime.debug.crash.trial import Ending, Outcome, Phase, Trial
from vime.errors import UsageError, VimeError

GPU = {
    "device": "cuda",
    "enforce_eager": False,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_mode": 3,
    "speculative": "eagle",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "disable_cascade_attn": False,
    "async_scheduling": True,
    "world_size": 8,
    "disable_custom_all_reduce": False,
    "expert_parallel": True,
    "all2all_backend": "deepep_low_latency",
    "enable_dbo": False,
    "attention_backend": "FLASH_ATTN",
    "max_num_seqs": 256,
    "kv_cache_dtype": "fp8",
    "block_size": 16,
    "enable_sleep_mode": True,
    "model_runner": "V2",
}
CPU = GPU | {
    "device": "cpu",
    "enforce_eager": True,
    "cudagraph_mode": "NONE",
    "cudagraph_capture_sizes": [],
    "compilation_mode": 0,
    "speculative": None,
    "async_scheduling": False,
    "disable_cascade_attn": True,
    "world_size": 1,
    "expert_parallel": False,
    "attention_backend": "CPU_ATTN",
    "kv_cache_dtype": "auto",
    "block_size": 128,
    "enable_sleep_mode": False,
    "model_runner": "V1",
}
Crash = Callable[[frozenset[str], frozenset[int]], bool]


class Engine:
    """Crashes where ``crash`` says so, of (axes that are as in the run, requests). ``ignores``: axes not applied."""

    def __init__(
        self, crash: Crash, facts=CPU, ignores=(), share=1.0, phase=Phase.SERVING, kind=Outcome.CRASHED
    ) -> None:
        self.crash, self.facts, self.ignores = crash, facts, ignores
        self.share, self.phase, self.kind = share, phase, kind
        self.draw = random.Random(0)
        self.num_starts = 0

    def __call__(self, trial: Trial) -> Ending:
        self.num_starts += 1
        facts = dict(self.facts)
        for toggle in trial.changed:
            if toggle.axis not in self.ignores:
                facts |= toggle.reads
        on = frozenset(axes()) - {t.axis for t in trial.changed if t.axis not in self.ignores}
        if self.crash(on, frozenset(trial.requests)) and self.draw.random() < self.share:
            known = {} if self.phase == Phase.STARTING else facts
            stack = ("f (a.py:1)",)
            return Ending(self.kind, self.phase, "SIGSEGV in the engine core", stack, known, self.facts["device"])
        return Ending(Outcome.SURVIVED, Phase.DONE, facts=facts)


def find(engine: Engine, num: int = 32, max_attempts: int = 100, **plan) -> tuple[Found, Ledger]:
    ledger = Ledger(engine, max_attempts)
    found = search(ledger, Plan(num, **plan), lambda text: None)
    assert engine.num_starts == len(ledger.attempts) <= max_attempts
    return found, ledger


def names(toggles_) -> set[str]:
    return {t.name for t in toggles_}


def test_a_crash_that_needs_two_settings_is_removed_by_either():
    guilty = {3, 17}
    engine = Engine(lambda on, sent: {"prefix_caching", "chunked_prefill"} <= on and guilty <= sent)
    found, ledger = find(engine)
    assert names(found.removing) == {"prefix_caching", "chunked_prefill"}
    assert found.is_enough
    assert set(found.requests) == guilty
    assert found.is_minimal
    assert found.num_crashed == 3
    assert found.last is not None
    assert found.last.trial.requests == (3, 17)
    assert found.last.trial.with_core_dump
    assert len(ledger.attempts) <= 3 + 4 + 2 * 2 + 1 + 19 + 1
    removing = [a for a in ledger.attempts if a.trial.names == ("prefix_caching",)]
    assert len(removing) == 3  # as often as it was confirmed
    what = report(found, ledger)
    assert what.doubts() == []
    assert dict(what.rows())["requests"] == (
        "2 of 32 show it; none can be left out: without any one of them 1 run survived"
    )


def test_a_crash_that_either_of_two_settings_makes_is_gone_only_without_both():
    engine = Engine(lambda on, sent: bool({"prefix_caching", "chunked_prefill"} & on) and 5 in sent)
    found, _ = find(engine)
    assert found.removing == []
    assert names(found.removing_set) == {"prefix_caching", "chunked_prefill"}
    assert found.requests == (5,)


def test_a_mixed_crash_has_a_smallest_set():
    """(a and b) or c: c has to go, and one of the other two."""

    def crash(on, sent):
        return {"prefix_caching", "chunked_prefill"} <= on or "block_size" in on

    found, _ = find(Engine(crash), num=4)
    assert found.removing == []
    assert names(found.removing_set) in ({"prefix_caching", "block_size"}, {"chunked_prefill", "block_size"})


def test_graphs_and_speculation_are_crossed_before_everything_else():
    engine = Engine(lambda on, sent: bool({"cuda_graph", "speculative"} & on), GPU)
    found, ledger = find(engine, num=2, num_runs=1)
    tried = [a.trial.names for a in ledger.attempts]
    assert tried[:4] == [(), ("cuda_graph",), ("speculative",), ("cuda_graph", "speculative")]
    assert names(found.removing_set) == {"cuda_graph", "speculative"}
    assert found.removing == []


def test_what_removes_it_is_narrowed_down():
    """Every mode of graphs; of batch sizes the largest that does not crash."""
    engine = Engine(lambda on, sent: "cuda_graph" in on, GPU)
    found, _ = find(engine, num=2, only=("cuda_graph",))
    assert {"cuda_graph", "cuda_graph=PIECEWISE", "cuda_graph=unpadded"} <= names(found.removing)

    class Batch(Engine):
        def __call__(self, trial: Trial) -> Ending:
            size = next((t.reads["max_num_seqs"] for t in trial.changed), 256)
            self.crash = lambda on, sent: min(size, len(sent)) > 4
            return super().__call__(trial)

    found, ledger = find(Batch(lambda on, sent: True), only=("batch_size",), num_runs=1)
    assert {t.reads["max_num_seqs"] for t in found.removing} >= {1, 4}
    assert max(t.reads["max_num_seqs"] for t in found.removing) == 4
    assert len(found.requests) == 5
    assert len(ledger.attempts) <= 1 + 1 + 3 + 25 + 1


def test_no_toggle_removes_it_is_said():
    found, ledger = find(Engine(lambda on, sent: 31 in sent))
    assert found.removing == []
    assert found.removing_set == ()
    assert found.stays
    assert found.requests == (31,)
    assert "no toggle removes it" in report(found, ledger).explanation


def test_nothing_crashes():
    found, ledger = find(Engine(lambda on, sent: False))
    assert not found.is_reproduced
    assert len(ledger.attempts) == 3
    what = report(found, ledger)
    assert what.verdict == NOT_REPRODUCED
    assert what.failed_checks == []
    assert dict(what.rows())["verdict"] == "NOT REPRODUCED: not reproduced in 3 runs"


def test_a_flaky_crash_is_repeated_before_it_counts_as_gone():
    engine = Engine(lambda on, sent: "prefix_caching" in on and {3, 5} <= sent, share=0.6)
    found, ledger = find(engine, num=8, num_runs=5, max_attempts=400)
    assert found.is_flaky
    assert names(found.removing) == {"prefix_caching"}
    innocent = [a for a in ledger.attempts if a.purpose == "requests" and not {3, 5} <= set(a.trial.requests)]
    times = Counter(a.trial.requests for a in innocent)
    assert set(times.values()) == {ledger.repeats} == {repeats_for(found.num_crashed, 5)}
    assert ledger.repeats > 1
    assert sum(a.trial.names == ("prefix_caching",) for a in ledger.attempts) == 5


def test_a_flaky_crash_that_looked_like_a_sure_one_is_doubted():
    """It came in each of the confirming runs, and then not every time."""
    endings = iter([True, True, True, False] + [True] * 90)
    engine = Engine(lambda on, sent: 1 in sent and next(endings))
    found, ledger = find(engine, num=4, only=("eager",))
    assert not found.is_flaky
    (doubt,) = report(found, ledger, 4).doubts()
    assert "it is flaky (confirm with more --runs)" in doubt
    assert ("doubtful", doubt) in report(found, ledger, 4).rows()


def test_repeats_overlook_a_crash_in_one_of_twenty():
    assert [repeats_for(k, 3) for k in (1, 2, 3)] == [8, 3, 1]
    assert repeats_for(1, 100) == 10


def test_all_requests_are_needed():
    found, _ = find(Engine(lambda on, sent: len(sent) == 6), num=6)
    assert found.requests == tuple(range(6))
    assert found.is_minimal


def test_a_hang_is_an_outcome_of_its_own():
    """A crash of another kind on the way is no evidence for the hang."""

    class Both(Engine):
        def __call__(self, trial: Trial) -> Ending:
            self.kind = Outcome.CRASHED if trial.names == ("block_size",) else Outcome.HUNG
            return super().__call__(trial)

    found, _ = find(Both(lambda on, sent: "prefix_caching" in on and 1 in sent), num=4)
    assert names(found.removing) == {"prefix_caching"}
    assert found.unknown == {"block_size": "crashed while serving: SIGSEGV in the engine core"}
    assert found.requests == (1,)


def test_of_a_crash_at_the_start_no_setting_is_read_back():
    """Of a text that fills pages, a line says the beginning; the result says all of it."""
    engine = Causes(lambda on, sent: True, lambda names, number: "ValueError: " + 200 * "x", phase=Phase.STARTING)
    found, ledger = find(engine, num=1, only=("prefix_caching", "block_size"))
    what = report(found, ledger, 1)
    assert what.explanation == (
        "no toggle removes it: it stays with all of them changed together; "
        "whether they were in force is not known: the engine did not come up"
    )
    assert {len(row[5]) for row in what.attempt_rows()} == {120}
    assert 200 * "x" in dict(what.rows())["crash"]


def test_the_same_error_at_the_start_is_no_evidence():
    class Starting(Engine):
        def __call__(self, trial: Trial) -> Ending:
            self.phase = Phase.STARTING if trial.names == ("block_size",) else Phase.SERVING
            return super().__call__(trial)

    found, _ = find(Starting(lambda on, sent: True), num=1, only=("block_size",))
    assert found.unknown == {"block_size": "crashed while starting: SIGSEGV in the engine core"}


class Causes(Engine):
    """Crashes with the cause that ``cause`` gives for (names of what is changed, number of the attempt)."""

    def __init__(self, crash, cause, **options) -> None:
        super().__init__(crash, **options)
        self.cause = cause

    def __call__(self, trial: Trial) -> Ending:
        ending = super().__call__(trial)
        cause = self.cause(trial.names, self.num_starts)
        return replace(ending, cause=cause) if ending.is_crash and cause else ending


def test_another_error_is_another_crash():
    """Without chunked prefill memory runs out: that says nothing of the crash that is looked for."""
    engine = Causes(
        lambda on, sent: "prefix_caching" in on or "chunked_prefill" not in on,
        lambda names, number: "OutOfMemoryError: 3 GiB" if "chunked_prefill" in names else f"CudaError: at {number}",
    )
    found, ledger = find(engine, num=1, only=("prefix_caching", "chunked_prefill"))
    assert names(found.removing) == {"prefix_caching"}
    assert found.unknown == {"chunked_prefill": "crashed while serving: OutOfMemoryError: 3 GiB"}
    assert found.num_crashed == 3  # whatever the number in its text
    verdicts = {name: verdict for name, verdict, _ in report(found, ledger, 1).toggle_rows()}
    assert verdicts["chunked_prefill"] == "NO EVIDENCE"


def test_a_crash_of_two_shapes_is_known_by_either():
    """A fault of memory may end as one signal or as another."""
    engine = Causes(
        lambda on, sent: 1 in sent,
        lambda names, number: "SIGABRT in the engine core" if number % 2 else "",
    )
    found, ledger = find(engine, num=2, only=("prefix_caching",))
    assert (found.num_crashed, found.num_runs) == (3, 3)
    assert names(found.staying) == {"prefix_caching"}
    assert found.requests == (1,)
    assert dict(report(found, ledger, 2).rows())["crash"] == (
        "SIGABRT in the engine core, or SIGSEGV in the engine core while serving"
    )


def test_what_most_of_the_confirming_runs_show_is_looked_for():
    class Mixed(Engine):
        def __call__(self, trial: Trial) -> Ending:
            self.kind = Outcome.HUNG if self.num_starts == 0 else Outcome.CRASHED
            return super().__call__(trial)

    found, ledger = find(Mixed(lambda on, sent: True), num=1, only=("eager",))
    assert ledger.first is not None
    assert ledger.first.outcome == Outcome.CRASHED
    assert (found.num_crashed, found.num_runs) == (2, 3)
    (doubt,) = report(found, ledger, 1).doubts()
    assert doubt == "one of the runs that confirm it ended otherwise: hung while serving: SIGSEGV in the engine core"


def test_a_toggle_that_did_not_survive_often_enough_is_not_decided():
    """The limit comes after the second of three: neither does it remove the crash, nor does the crash stay."""
    engine = Engine(lambda on, sent: "prefix_caching" in on)
    found, ledger = find(engine, only=("prefix_caching", "block_size"), max_attempts=6)
    what = report(found, ledger)
    verdicts = {name: (verdict, why) for name, verdict, why in what.toggle_rows()}
    assert found.removing == []
    assert verdicts["prefix_caching"][0] == "NOT DECIDED"
    assert "survived 2 times, which is not enough" in verdicts["prefix_caching"][1]
    assert verdicts["block_size"][0] == "NOT TRIED"
    assert what.explanation == (
        "no toggle was found that removes it: it stays with 0 of 2, of the others nothing is known"
    )


def test_confirming_that_is_cut_short_makes_no_flaky_crash():
    found, ledger = find(Engine(lambda on, sent: True), max_attempts=2)
    assert (found.num_crashed, found.num_runs) == (2, 2)
    assert not found.is_flaky
    what = report(found, ledger)
    assert dict(what.rows())["verdict"] == "CRASH: crashed in 2 of 2"
    assert what.explanation == "no toggle was found that removes it: none was changed"


def test_a_set_of_toggles_that_is_cut_short_is_not_called_smallest():
    engine = Engine(lambda on, sent: bool({"prefix_caching", "chunked_prefill"} & on))
    axes_ = ("prefix_caching", "chunked_prefill", "block_size")
    whole, ledger = find(engine, num=1, num_runs=1, only=axes_)
    assert whole.is_set_minimal
    assert report(whole, ledger, 1).explanation == (
        "it is gone only with prefix_caching and chunked_prefill changed together"
    )
    engine = Engine(engine.crash)
    cut, ledger = find(engine, num=1, num_runs=1, only=axes_, max_attempts=6)
    assert not cut.is_set_minimal
    assert report(cut, ledger, 1).explanation.endswith("changed together; whether fewer are enough is not known")


def test_a_request_without_which_the_engine_ends_otherwise_is_not_known_to_be_needed():
    class Otherwise(Engine):
        def __call__(self, trial: Trial) -> Ending:
            self.kind = Outcome.HUNG if trial.requests == (3,) else Outcome.CRASHED
            return super().__call__(trial)

    engine = Otherwise(lambda on, sent: {1, 3} <= sent or sent == {3})
    found, ledger = find(engine, num=4, only=("eager",))
    assert found.requests == (1, 3)
    assert not found.is_minimal
    assert dict(report(found, ledger, 4).rows())["requests"] == (
        "2 of 4 show it; whether 1/0 can be left out is not known"
    )


def test_a_toggle_that_has_another_in_force_as_well_is_not_counted_twice():
    """Eager has no graphs: a crash of graphs needs one thing, not two."""

    class Eager(Engine):
        def __call__(self, trial: Trial) -> Ending:
            ending = super().__call__(trial)
            if "eager" in trial.names:
                return replace(ending, facts={**ending.facts, "cudagraph_mode": "NONE"})
            return ending

    engine = Eager(lambda on, sent: {"cuda_graph", "eager"} <= on, facts=GPU)
    found, ledger = find(engine, num=1, only=("cuda_graph", "eager"))
    assert {"cuda_graph", "eager"} <= names(found.removing)
    assert report(found, ledger, 1).explanation == "changing cuda_graph removes it"


@pytest.mark.parametrize("num_done", [0, 2, 4, 12])
def test_ctrl_c_leaves_what_is_known_by_then(num_done):
    class Interrupted(Engine):
        def __call__(self, trial: Trial) -> Ending:
            if self.num_starts == num_done:
                raise KeyboardInterrupt
            return super().__call__(trial)

    engine = Interrupted(lambda on, sent: "prefix_caching" in on and 3 in sent)
    found, ledger = find(engine, only=("prefix_caching",))
    assert found.is_interrupted
    assert len(ledger.attempts) == num_done
    assert found.num_crashed == min(num_done, 3)
    assert 3 in found.requests
    assert report(found, ledger).failed_checks == []
    assert not found.is_minimal


@pytest.mark.parametrize("guilty", [("prefix_caching",), ("cuda_graph", "batch_size"), tuple(axes()), ()])
@pytest.mark.parametrize("needs", [all, any])
@pytest.mark.parametrize("facts", [CPU, GPU])
def test_what_is_printed_before_as_a_limit_holds(guilty, needs, facts):
    """Of the settings one at a time, then of those together, then of the requests."""
    said: list[tuple[int, str]] = []
    engine = Engine(lambda on, sent: not guilty or needs(axis in on for axis in guilty), facts)
    ledger = Ledger(engine, 1000)
    search(ledger, Plan(16), lambda text: said.append((len(ledger.attempts), text)))
    said.append((len(ledger.attempts), ""))
    limits = [(begin, re.search(r"[Aa]t most (\d+) engine", text), end) for (begin, text), (end, _) in pairwise(said)]
    found = [(end - begin, int(match[1])) for begin, match, end in limits if match]
    assert found
    assert all(num <= limit for num, limit in found)


def test_a_crash_before_any_request():
    found, ledger = find(Engine(lambda on, sent: "prefix_caching" in on, phase=Phase.STARTING), num=8)
    assert found.requests == ()
    what = report(found, ledger, 8)
    assert dict(what.rows())["requests"] == "none: it crashes before any is sent"
    reasons = {name: why for name, verdict, why in what.toggle_rows() if verdict == "STAYS"}
    assert reasons["block_size"].endswith("not read back: the engine did not come up")


def test_settings_that_do_not_reach_the_worker_are_no_evidence():
    """Case D21: the attempt survives, but the worker reads the old value: the crash was not removed by it."""

    class Ignored(Engine):
        def __call__(self, trial: Trial) -> Ending:
            ending = super().__call__(trial)
            if trial.names == ("prefix_caching",):
                return Ending(Outcome.SURVIVED, Phase.DONE, facts=self.facts)
            return ending

    found, ledger = find(Ignored(lambda on, sent: "chunked_prefill" in on, ignores=("prefix_caching",)), num=2)
    assert names(found.removing) == {"chunked_prefill"}
    assert "the worker reads enable_prefix_caching = True" in found.not_applied["prefix_caching"]
    verdicts = {name: verdict for name, verdict, _ in report(found, ledger, 2).toggle_rows()}
    assert verdicts["prefix_caching"] == "NOT APPLIED"
    assert verdicts["chunked_prefill"] == "REMOVES IT"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 12, 20])
def test_the_limit_holds_and_is_said(limit):
    engine = Engine(lambda on, sent: {"prefix_caching", "chunked_prefill"} <= on and {3, 17} <= sent)
    found, _ = find(engine, max_attempts=limit)
    assert found.stopped == f"--max-attempts {limit} reached"
    assert {3, 17} <= set(found.requests)
    assert engine.num_starts <= limit


def test_settings_that_are_refused_are_no_crash():
    with pytest.raises(VimeError, match="refuses the run's own settings"):
        find(Engine(lambda on, sent: True, kind=Outcome.REFUSED))


def test_on_a_cpu_what_it_does_not_have_is_skipped_with_the_reason():
    skipped = {t.name: t.skip for t in toggles(CPU, 32) if t.skip}
    assert "captures no CUDA graphs" in skipped["cuda_graph"]
    assert "no CUDA device" in skipped["launch_blocking"]
    assert "its worker reads CPU_ATTN" in skipped["attention_backend=TRITON_ATTN"]
    assert skipped["eager"] == "the run has it so already: its worker reads enforce_eager = True"
    assert {t.axis for t in toggles(CPU, 32) if not t.skip} == {
        "prefix_caching",
        "chunked_prefill",
        "batch_size",
        "block_size",
    }
    assert {t.axis for t in toggles(GPU | {"enable_dbo": True}, 32) if not t.skip} == set(axes())


def test_of_an_engine_that_never_came_up_everything_is_tried():
    """It crashes as it starts: nothing was read back, and nothing is taken for granted."""
    assert {t.axis for t in toggles({"device": "cuda"}, 8) if not t.skip} == set(axes())
    skipped = {t.axis for t in toggles({"device": "cpu"}, 8) if t.skip}
    assert {"cuda_graph", "launch_blocking", "attention_backend"} <= skipped
    assert "speculative" not in skipped


def test_another_attention_backend_than_the_one_in_force_is_tried():
    found = [t for t in toggles(GPU | {"attention_backend": "TRITON_ATTN"}, 8) if t.axis == "attention_backend"]
    assert [t.name for t in found if not t.is_narrow and not t.skip] == ["attention_backend=FLASHINFER"]


def test_axes_are_chosen_by_name():
    assert names(chosen(toggles(CPU, 32), ["prefix_caching"], [])) == {"prefix_caching"}
    assert "prefix_caching" not in names(chosen(toggles(CPU, 32), [], ["prefix_caching"]))
    with pytest.raises(UsageError, match="--only graphs: is no axis"):
        check_axes(["graphs"], "--only")


def test_settings_are_laid_over_those_of_the_run():
    found = {t.name: t for t in toggles(GPU, 32)}
    own = {"speculative_config": {"method": "ngram"}, "compilation_config": {"mode": 3}, "max_num_seqs": 8}
    assert overlaid(own, [found["cuda_graph"], found["speculative"]]) == {
        "compilation_config": {"mode": 3, "cudagraph_mode": "NONE"},
        "max_num_seqs": 8,
    }


def report(found: Found, ledger: Ledger, num: int = 32) -> CrashReport:
    requests = [Request(f"{i}/0", 5, i, f"prompt {i}") for i in range(num)]
    return CrashReport(found, ledger.attempts, ledger.max_attempts, requests, ledger.sought, "runs/x", 1.0)
