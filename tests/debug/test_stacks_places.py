"""What canned stacks say: who stands alike, who is odd, whom the others wait for."""

import os

import pytest

import vime
from vime.debug.everywhere import Picture
from vime.debug.places import groups_of, place_of, short_lines, shown_names
from vime.debug.processes import Member
from vime.debug.stacks import MAIN, Dump, Frame, Thread

SITE = "/env/lib/python3.11/site-packages"
VIME = os.path.dirname(vime.__file__)
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
RAY = f"{SITE}/ray/_private/worker.py"
STEP = Frame("_finalize", f"{VIME}/backends/megatron/step.py", 106)
BOTTOM = [Frame("call", f"{VIME}/cluster/trainer.py", 51), Frame("Worker.main_loop", RAY, 1069)]
ALL_REDUCE = [
    Frame("all_reduce", C10D, 3000),
    Frame("wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83),
    Frame("reduce_grads", f"{SITE}/megatron/core/x.py", 7),
    STEP,
    *BOTTOM,
]
BROADCAST = [Frame("broadcast", C10D, 2800), *ALL_REDUCE[1:]]
MEGATRON = f"{SITE}/megatron/core/distributed/param_and_grad_buffer.py"
COALESCED = [
    Frame("c10d::Work::wait", f"{SITE}/torch/lib/libtorch_cpu.so", 0),
    Frame("_coalescing_manager", C10D, 2935),
    Frame("_GeneratorContextManager.__exit__", "/usr/lib/python3.11/contextlib.py", 144),
    Frame("_ParamAndGradBucketGroup.start_grad_sync", MEGATRON, 433),
    STEP,
    *BOTTOM,
]
STARTED_BEFORE = [Frame("_BucketGroup.finish_grad_sync", MEGATRON, 519), STEP, *BOTTOM]
REWARD = [Frame("score", "/home/me/reward.py", 12), STEP, *BOTTOM]
IDLE = [Frame("Worker.main_loop", RAY, 1069), Frame("<module>", f"{SITE}/ray/_private/workers/default_worker.py", 323)]
WORKER = f"{VIME}/reward/worker.py"
FREE_WORKER = [Frame("_recv", "/usr/lib/python3.11/multiprocessing/connection.py", 5), Frame("main", WORKER, 66)]
GATHER = [Frame("wait", RAY, 3000), Frame("gather", f"{VIME}/cluster/waiting.py", 24)]
AT_POINT = [Frame("_wait", f"{VIME}/debug/stop/pause.py", 216), Frame("hit", f"{VIME}/debug/stop/hit.py", 60)]
ATTACHED = [
    Frame("wait", "/usr/lib/python3.11/threading.py", 327),
    Frame("_do_wait_suspend", f"{SITE}/debugpy/_vendored/pydevd/pydevd.py", 2156),
]
THREADS = "/usr/lib/python3.11/threading.py"
CORE_STEP = Frame("step", f"{SITE}/vllm/v1/engine/core.py", 665)
UNDER_RUNNER = [*REWARD[:1], Frame("main", f"{VIME}/debug/stop/runner.py", 80)]
CORE_IDLE = [
    Frame("get", "/usr/lib/python3.11/queue.py", 171),
    Frame("EngineCoreProc._process_input_queue", f"{SITE}/vllm/v1/engine/core.py", 1000),
]


def dump_of(role, rank, frames, problem="", label="", others=()):
    threads = (Thread(MAIN, tuple(frames)), *others) if frames else ()
    return Dump(Member(role, rank, 100 + rank, "h", 1, "b", label=label), threads, "py-spy", problem)


def ranks(*stacks):
    return Picture(tuple(dump_of("trainer", rank, frames) for rank, frames in enumerate(stacks)))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (ALL_REDUCE, "all_reduce <- step.py:106 _finalize"),
        (COALESCED, "start_grad_sync <- step.py:106 _finalize"),
        (STARTED_BEFORE, "finish_grad_sync <- step.py:106 _finalize"),
        (REWARD, "reward.py:12 score"),
        (GATHER, "wait <- waiting.py:24 gather"),
        (IDLE, "idle: no work"),
        ([Frame("epoll_wait", "/usr/lib/libc.so.6", 0), Frame("run", "/x/ray/_raylet.so", 0), *IDLE], "idle: no work"),
        ([Frame("select_poll_impl", "selectmodule.c", 2259), *GATHER], "wait <- waiting.py:24 gather"),
        (CORE_IDLE, "idle: no work"),
        (FREE_WORKER, "idle: no work"),
        ([Frame("lock", f"{SITE}/lib.py", 3)], "lock"),
        ([*AT_POINT, STEP, *BOTTOM], "the debugger <- step.py:107 _finalize"),
        ([*ATTACHED, CORE_STEP, *BOTTOM], "the debugger <- core.py:665 step"),
        ([*ATTACHED, Frame("_bootstrap", THREADS, 1002)], "wait"),
        (UNDER_RUNNER, "reward.py:12 score"),
    ],
)
def test_a_place_is_the_own_frame_and_what_it_waits_in(frames, text):
    assert str(place_of(Thread(MAIN, tuple(frames)))) == text


@pytest.mark.parametrize("frames", [ALL_REDUCE, COALESCED, STARTED_BEFORE])
def test_a_collective_is_recognised(frames):
    assert place_of(Thread(MAIN, tuple(frames))).is_waiting_for_others


def test_the_rank_that_is_missing_is_named_and_comes_first():
    """The issue's own words: 3 ranks in all_reduce, rank 1 in reward.py:12."""
    found = ranks(ALL_REDUCE, REWARD, ALL_REDUCE, ALL_REDUCE)
    assert found.culprit == "trainer rank 1 is in reward.py:12 score; ranks 0, 2, 3 wait for it in all_reduce"
    assert [group.title for group in groups_of(found.dumps)] == [
        "trainer rank 1: reward.py:12 score",
        "trainer ranks 0, 2, 3: all_reduce <- step.py:106 _finalize",
    ]


def test_a_rank_that_a_debugger_has_stopped_is_shown_where_it_stands():
    found = ranks(ALL_REDUCE, [*AT_POINT, STEP, *BOTTOM])
    assert (
        found.culprit
        == "trainer rank 1 is in step.py:107 _finalize, in the debugger; rank 0 waits for it in all_reduce"
    )
    assert "debug/stop" not in "".join(short_lines(groups_of(found.dumps)))


def test_a_rank_in_vimes_own_code_is_odd_as_well():
    found = ranks(COALESCED, [STEP, *BOTTOM])
    assert found.culprit == "trainer rank 1 is in step.py:106 _finalize; rank 0 waits for it in start_grad_sync"


def test_a_rank_in_another_collective_is_odd():
    found = ranks(ALL_REDUCE, ALL_REDUCE, BROADCAST)
    assert found.culprit == (
        "trainer rank 2 is in step.py:106 _finalize, in broadcast; ranks 0, 1 wait for it in all_reduce: "
        "not the same collective"
    )


def test_a_rank_that_has_ended_or_does_not_answer_is_odd():
    dumps = (dump_of("trainer", 0, ALL_REDUCE), dump_of("trainer", 1, [], problem="has ended"))
    assert Picture(dumps).culprit == "trainer rank 1: has ended; rank 0 waits for it in all_reduce"
    assert groups_of(dumps)[0].title == "trainer rank 1: has ended"


def test_a_rank_without_work_is_odd_where_others_wait():
    found = ranks(IDLE, ALL_REDUCE, ALL_REDUCE)
    assert found.culprit.startswith("trainer rank 0 is done with its call, or never got it; ranks 1, 2 wait for it in ")


@pytest.mark.parametrize("stacks", [(ALL_REDUCE, ALL_REDUCE), (IDLE, IDLE), ()])
def test_nobody_is_blamed_where_all_stand_alike(stacks):
    assert ranks(*stacks).culprit == ""


def test_a_reward_and_a_blocked_driver_are_named():
    """Trainers and engines without work are not to blame, nor is a driver that waits."""
    worker = dump_of("reward worker", 0, [Frame("score", "/home/me/reward.py", 12), Frame("answer", WORKER, 80)])
    free = dump_of("reward worker", 1, FREE_WORKER)
    idle = [dump_of("trainer", 0, IDLE), dump_of("engine", 0, IDLE), dump_of("engine core", 0, CORE_IDLE)]
    waiting = dump_of("driver", 0, GATHER)
    assert Picture((waiting, *idle, free, worker)).culprit == "reward worker 0 (pid 100) is in reward.py:12 score"
    library = dump_of("reward worker", 0, [Frame("parse", f"{SITE}/sympy/a.py", 1), Frame("answer", WORKER, 80)])
    assert Picture((waiting, *idle, library)).culprit == "reward worker 0 (pid 100) is in worker.py:80 answer, in parse"
    blocked = dump_of("driver", 0, [Frame("generate", "/home/me/gen.py", 4), *GATHER[1:]])
    assert Picture((blocked, *idle, free)).culprit == "driver (pid 100) is in gen.py:4 generate"
    assert Picture((waiting, *idle, free)).culprit == ""


def test_an_engine_core_that_is_in_a_step_is_named_where_nobody_else_is():
    core = dump_of("engine core", 0, [Frame("mm", f"{SITE}/torch/nn.py", 9)], label="engine 0 core")
    assert Picture((dump_of("engine", 0, IDLE), core)).culprit.startswith("engine 0 core (pid 100) is in ")


def test_threads_with_own_code_have_a_line_and_the_others_are_counted():
    pool = Thread("worker_0", (Frame("wait", "/usr/lib/python3.11/threading.py", 1),))
    busy = Thread("loader", (Frame("read", "/home/me/data.py", 5),))
    lines = short_lines(groups_of([dump_of("trainer", 0, ALL_REDUCE, others=(pool, busy, pool))]))
    assert lines == [
        "trainer rank 0: all_reduce <- step.py:106 _finalize",
        f"    _finalize ({VIME}/backends/megatron/step.py:106)",
        f"    call ({VIME}/cluster/trainer.py:51)",
        "    thread loader: data.py:5 read",
        "    (+2 other threads)",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([1, 2], "ranks 1, 2"), ([0, 1, 2, 3, 7], "ranks 0-3, 7"), ([9, 10, 11], "ranks 9-11")],
)
def test_ranks_are_shown_as_ranges(ranks, text):
    assert shown_names([f"trainer rank {rank}" for rank in ranks]) == f"trainer {text}"
    assert shown_names(["driver", "engine 0"]) == "driver, engine 0"
