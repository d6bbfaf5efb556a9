"""The rollout record: one file per rollout that opens anywhere and can run no code. See docs/formats.md."""

from vime.record.inspect import describe
from vime.record.read import read
from vime.record.template import check_template, list_ids, missing_problem, template_path
from vime.record.write import RecordWriter, write

__all__ = [
    "RecordWriter",
    "check_template",
    "describe",
    "list_ids",
    "missing_problem",
    "read",
    "template_path",
    "write",
]
