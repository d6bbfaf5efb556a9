"""A breakpoint left in an actor's code, or in a process below it, does not hold it for ever (cases D01, D16)."""

import os
import subprocess
import sys

import pytest

from vime.cluster.session import RaySession
from vime.cluster.waiting import gather
from vime.config.schema import Config
from vime.reward.breakpoints import IGNORED_HOOK, RAY_DEBUG, ignore_in_worker


class Forgetful:
    """``is_told``: as the actors of a run, which say what they ignore."""

    def __init__(self, is_told):
        if is_told:
            ignore_in_worker()

    def stop(self):
        breakpoint()
        child = subprocess.run(
            [sys.executable, "-c", "breakpoint()"], stdin=subprocess.DEVNULL, timeout=30, check=False
        )
        return os.environ["PYTHONBREAKPOINT"], child.returncode


@pytest.fixture(scope="module")
def session():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")  # as `ray job submit` leaves it
        patch.setenv(RAY_DEBUG, "0")  # so that it is as before afterwards
        patch.delenv(RAY_DEBUG)
        found = RaySession.start(Config(model={"path": "m"}, data={"prompts": ["p"]}))
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield found
        found.close()


def test_actors_go_on(session):
    told, untold = (session.start_actor(Forgetful, f"actor {i}", {"num_cpus": 0}, i == 0) for i in range(2))
    found = gather({"told": told.stop.remote(), "untold": untold.stop.remote()}, 60, "the breakpoints")
    assert found == {"told": (IGNORED_HOOK, 0), "untold": ("ray.util.rpdb.set_trace", 0)}


def test_the_driver_keeps_its_own_hook(session, capfd):
    """Ray sets one of its own in whoever connects; it fails in every process that the driver starts."""
    assert os.environ["PYTHONBREAKPOINT"] == IGNORED_HOOK
    breakpoint()
    assert "test_actor_breakpoints.py" in capfd.readouterr().err
    code = subprocess.run([sys.executable, "-c", "breakpoint()"], stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert code.returncode == 0
