"""Ray takes the handler of SIGTERM away beneath Python, in the midst of its shutdown."""

import ctypes
import os
import signal
import time

import pytest

from vime.cluster.signals import handler_kept


@pytest.fixture
def heard():
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_native_code_takes_away_is_put_back(heard):
    libc = ctypes.CDLL(None)
    ignored = ctypes.c_void_p(1)  # SIG_IGN: the default would end the tests
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    with handler_kept(signal.SIGTERM):
        libc.signal(int(signal.SIGTERM), ignored)
        deadline = time.monotonic() + 20
        while not heard and time.monotonic() < deadline:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert heard
        libc.signal(int(signal.SIGTERM), ignored)
    heard.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
