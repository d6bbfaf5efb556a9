"""Several runs one after the other in one session: the next finds what the one before held."""

import os
import sys

from vime.cluster.session import RaySession
from vime.config.schema import Config


class Worker:
    def pid(self):
        return os.getpid()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_started_after_others_have_ended_has_all_resources():
    session = RaySession.start(Config(model={"path": "m"}, data={"prompts": ["p"]}))
    try:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
        free = session.resources()["CPU"]
        for _ in range(2):
            worker = session.start_actor(Worker, "worker", {"num_cpus": free})
            pid = ray.get(worker.pid.remote(), timeout=60)
            session.watch([pid])
            session.end_actors()
            assert not is_alive(pid)
            assert session.resources()["CPU"] == free
    finally:
        session.close()
