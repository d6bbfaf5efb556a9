"""The rollout record: one file per rollout that opens anywhere and can run no code. See docs/formats.md."""

import importlib
from typing import Any

from vime.record.template import check_template, list_ids, missing_problem, parse_ids, template_path, training_template

# These need numpy, which checking a template does not: a light install has none.
_LATER = {
    "RecordWriter": "vime.record.writer",
    "RecordedRollouts": "vime.record.recorded",
    "read": "vime.record.reader",
    "write": "vime.record.writer",
}

__all__ = [
    "RecordWriter",
    "RecordedRollouts",
    "check_template",
    "list_ids",
    "missing_problem",
    "parse_ids",
    "read",
    "template_path",
    "training_template",
    "write",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(name)
