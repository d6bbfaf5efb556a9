"""Known issues of the libraries, by version and setting: one data file, ``known_issues.toml``, and its reader."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vime.config.load import value_of
from vime.config.message import UNSET
from vime.config.schema import Config
from vime.models import ModelSpec

FILE = Path(__file__).with_name("known_issues.toml")
_CONDITION = re.compile(r"([\w.]+) (==|!=|>|>=|<|<=) (.+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """``setting operator value``. A setting that is not there is unequal to everything, and neither more nor less."""

    setting: str
    operator: str
    value: Any

    @classmethod
    def of(cls, text: str) -> Condition:
        """ValueError for what is no condition."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not SETTING OPERATOR VALUE")
        return cls(found[1], found[2], tomllib.loads(f"value = {found[3]}")["value"])

    def holds(self, actual: Any) -> bool:
        if self.operator in ("==", "!="):
            return (actual == self.value) == (self.operator == "==")
        if actual is UNSET or actual is None:
            return False
        below = bool(actual < self.value)
        if self.operator in ("<", ">="):
            return below == (self.operator == "<")
        return (below or actual == self.value) == (self.operator == "<=")


@dataclass(frozen=True, slots=True)
class Issue:
    """One entry of the file, see its head."""

    library: str
    versions: str
    when: tuple[Condition, ...]
    symptom: str
    advice: str
    source: str
    mended_by: str = ""

    def applies(self, facts: Facts, installed: Mapping[str, str]) -> bool:
        from packaging.specifiers import SpecifierSet

        version = installed.get(self.library)
        if version is None or version.split("+")[0] not in SpecifierSet(self.versions, prereleases=True):
            return False
        return all(condition.holds(facts.value(condition.setting)) for condition in self.when)


@dataclass(frozen=True, slots=True)
class Facts:
    """What conditions ask for: settings, ``spec.NAME`` of the model, ``device``."""

    config: Config
    spec: ModelSpec
    device: str

    def value(self, setting: str) -> Any:
        if setting == "device":
            return self.device
        if setting.startswith("spec."):
            return getattr(self.spec, setting.removeprefix("spec."))
        return value_of(self.config, setting)


@cache
def known_issues() -> tuple[Issue, ...]:
    """All entries. ValueError, KeyError or TypeError where the file is not as its head says."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))["issue"]
    return tuple(Issue(**{**row, "when": tuple(Condition.of(text) for text in row["when"])}) for row in rows)


def that_apply(facts: Facts, installed: Mapping[str, str]) -> Sequence[Issue]:
    """``installed``: version by package, see ``vime.run_folder.versions``."""
    return [issue for issue in known_issues() if issue.applies(facts, installed)]
