"""The names of faults: each has a check that there is, a place that plants it, and a row in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.align.answer_faults import ANSWER_FAULTS
from vime.align.checks import CHECKS
from vime.align.export_faults import EXPORT_FAULTS
from vime.align.faults import FAULTS, Place, require
from vime.config.schema import Config
from vime.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
WITHOUT_CHECK = {"hung-rank"}


def config(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["p"]}, **sections})


def test_every_fault_has_a_check_that_there_is():
    names = {check.name for check in CHECKS}
    assert {name for name, fault in FAULTS.items() if fault.check not in names} == WITHOUT_CHECK


def test_faults_of_export_and_answers_are_those_that_are_planted_there():
    assert set(EXPORT_FAULTS) == {name for name, fault in FAULTS.items() if fault.place == Place.EXPORT}
    assert set(ANSWER_FAULTS) == {name for name, fault in FAULTS.items() if fault.place == Place.ANSWERS}


def test_prompts_and_checkpoint_alone_are_planted_before_anything_begins():
    assert {name for name, fault in FAULTS.items() if fault.is_early} == {"wrong-chat-template", "base-model"}


def test_a_layout_without_a_place_for_the_fault_is_refused():
    with pytest.raises(UsageError, match=r"wrong-normalizer needs parallel.dp >= 2; parallel.dp = 1"):
        require("wrong-normalizer", config())
    require("wrong-normalizer", config(parallel={"dp": 2}))
    require("router-bias", config())  # what a model must have, the planter sees
    with pytest.raises(UsageError, match=r"raw-log-probs needs rollout.sampling.temperature != 1; .* = 1$"):
        require("raw-log-probs", config())
    require("raw-log-probs", config(rollout={"sampling": {"temperature": 0.7}}))


def test_the_page_of_the_documentation_names_every_fault_and_every_check():
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in FAULTS if f"`{name}`" not in text] == []
    assert [check.name for check in CHECKS if f"`{check.name}`" not in text] == []
    assert [f"{c.step} `{c.name}`" for c in CHECKS if f"- {c.step} `{c.name}`: {c.title}" not in text] == []
