"""How the parts of a run end, and what is recorded of them."""

import hashlib
import logging
import os
import signal
import subprocess
import sys

import pytest
from fakes import sample

from vime.config.load import load, to_toml
from vime.errors import VimeError
from vime.record import RecordWriter, read
from vime.runs.ending import ends_in_order
from vime.runs.parts import SavedRollouts, _ended, _header
from vime.types import RolloutBatch, TensorEntry, WeightManifest
from vime.weights.manifest import manifest_digest


class Engines:
    """Engines whose actor is gone: they cannot be asked to end."""

    def shutdown(self):
        raise VimeError("ending the engines: engine 0 died")


def test_the_end_of_the_engines_does_not_hide_the_first_cause():
    with pytest.raises(VimeError, match="generate: engine 0 died"), _ended(Engines()):
        raise VimeError("generate: engine 0 died")
    with pytest.raises(VimeError, match="ending the engines"), _ended(Engines()):
        pass


class Rollouts:
    def produce(self, rollout_id):
        return RolloutBatch.from_samples(rollout_id, [sample(0, 0)])


class Transport:
    manifest = WeightManifest(3, "trainer", {"w": TensorEntry("w", (1,), "float32", "ab")})


def test_a_record_names_the_weights_that_generated_it(tmp_path):
    with RecordWriter(str(tmp_path / "r_{rollout_id}.pt")) as writer:
        batch = SavedRollouts(Rollouts(), writer, Transport()).produce(3)
    assert batch.header.manifest_digest == manifest_digest(Transport.manifest)
    assert read(tmp_path / "r_3.pt").header.manifest_digest == batch.header.manifest_digest


def test_the_header_says_configuration_and_model(tmp_path):
    """docs/formats.md: config_digest is that of the run folder's config.toml."""
    model = '{"model_type": "llama", "num_attention_heads": 1, "hidden_size": 4, "num_hidden_layers": 1, '
    model += '"intermediate_size": 4, "vocab_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8}'
    (tmp_path / "config.json").write_text(model)
    config = load([], [f"model.path={tmp_path}", 'data.prompts=["p.jsonl"]']).config
    info = {"sampling": {}, "sampling_origin": {}, "stop_token_ids": []}
    header = _header(config, Tokenizer(), info)
    assert header.config_digest == hashlib.blake2b(to_toml(config).encode(), digest_size=16).hexdigest()
    assert header.model["family"] == "llama"
    assert header.model["config_digest"] == hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
    assert all(header.model.values())


class Tokenizer:
    chat_template = "{{ messages }}"

    def get_vocab(self):
        return {"a": 0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_the_end_is_not_disturbed_by_the_next(number, monkeypatch):
    before = signal.getsignal(number)
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", False)
    ended = []

    def run():
        with ends_in_order():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
                ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert ended == [True]
    assert signal.getsignal(number) is before


CUT_SHORT = """
import asyncio, os, signal
from vime.runs.ending import ends_in_order

async def task(number):
    await asyncio.sleep(0)
    if number == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

async def tasks():
    await asyncio.wait([asyncio.create_task(task(number)) for number in range(3)])

try:
    with ends_in_order():
        asyncio.run(tasks())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_tasks_that_a_signal_cuts_short_are_no_news():
    ended = subprocess.run([sys.executable, "-c", CUT_SHORT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("interrupted\n", "", 0)
