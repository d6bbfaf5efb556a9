"""A report that cannot be written is still shown."""

from pathlib import Path

import pytest

from vime.errors import VimeError
from vime.run_folder import RunFolder
from vime.runs.align import Asked, _kept
from vime.types import AlignReport, CheckResult, Verdict
from vime_cli import output


def test_what_was_found_is_shown_where_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = AlignReport((CheckResult("weights", Verdict.FAIL, "46 of 47 tensors"),), {}, {"weights": 1.0})
    found = _kept(report, RunFolder(tmp_path / "gone"), Asked())
    with pytest.raises(VimeError, match="cannot be written"):
        output.aligned(found, as_json=False)
    shown = capsys.readouterr().out
    assert "46 of 47 tensors" in shown
    assert "FAIL: 1 FAIL" in shown
