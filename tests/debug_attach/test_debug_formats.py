"""What docs/formats.md says that the processes of a debug run share is what they write."""

from dataclasses import fields
from pathlib import Path

import pytest

from vime.debug.attach.doctor import Check
from vime.debug.stop.hold import GROUP, NOTE
from vime.debug.stop.records import Stop
from vime.debug.stop.say import SAID
from vime.debug.stop.spec import FORMAT, Point, Spec, Who
from vime.debug.stop.tally import KIND, Tally
from vime.debug.stop.worker import PROOF

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
SHARED = "## What the processes of a debug run share"
LISTED = "## What `vime debug-attach list --json` prints"
CHECKED = "## What `vime debug-attach doctor --json` prints"


def section(title: str) -> str:
    assert FORMATS.count(title) == 1
    return FORMATS.partition(title)[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("kind", "title"),
    [(Spec, SHARED), (Point, SHARED), (Who, SHARED), (Tally, SHARED), (Stop, LISTED), (Check, CHECKED)],
)
def test_every_field_is_described(kind, title):
    text = section(title)
    unnamed = [field.name for field in fields(kind) if f"`{field.name}`" not in text and f"`.{field.name}`" not in text]
    derived = {"point", "pid", "hostname"} if kind is Tally else set()  # in the name of the entry
    assert set(unnamed) - derived == set()


def test_every_name_in_the_registry_is_described():
    text = section(SHARED)
    assert f'"{FORMAT}"' in text
    assert all(f"`SESSION/{name}" in text for name in ("run", "stop/", "release/", "claim/", f"{KIND}/", f"{SAID}/"))
    assert all(f"`{name.removeprefix('note/')}" in text for name in (NOTE, GROUP, PROOF))
