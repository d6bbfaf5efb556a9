"""Templates: cases P03 and P12."""

import pytest

from vime.errors import UsageError
from vime.record import check_template, list_ids, missing_problem, parse_ids, template_path


def test_path_is_the_format_of_the_template():
    assert str(template_path("/d/data_{rollout_id}.pt", 7)) == "/d/data_7.pt"
    assert str(template_path("/d/{rollout_id:04d}/x.pt", 7)) == "/d/0007/x.pt"


def test_several_rollouts_need_the_placeholder(tmp_path):
    assert check_template(str(tmp_path / "x.pt"), 1) == []
    (problem,) = check_template(str(tmp_path / "x.pt"), 3)
    assert "one file for 3 rollouts" in problem


BROKEN = ["d_{id}.pt", "d_{}.pt", "d_{rollout_id", "d_{rollout_id:q}.pt", "", "{0}.pt"]
BROKEN += ["{rollout_id:.0e}", "{rollout_id:c}", "{rollout_id:>9}", "{rollout_id!r}", "{rollout_id:999999999999d}"]


@pytest.mark.parametrize("template", BROKEN)
def test_broken_templates_are_refused(template):
    assert len(check_template(template, 1)) == 1
    with pytest.raises(UsageError):
        template_path(template, 0)


def test_existing_outputs_are_problems_unless_overwriting(tmp_path):
    template = str(tmp_path / "x_{rollout_id}.pt")
    (tmp_path / "x_1.pt").touch()
    assert check_template(template, 1) == []
    (problem,) = check_template(template, 2)
    assert "x_1.pt exists already" in problem
    assert check_template(template, 2, overwrite=True) == []
    assert check_template(template, 2, first_rollout_id=2) == []


def test_existing_ids_are_listed(tmp_path):
    for name in ("x_0.pt", "x_2.pt", "x_10.pt", "x_03.pt", "x_a.pt", ".x_5.pt.tmp", "y_4.pt"):
        (tmp_path / name).touch()
    assert list_ids(str(tmp_path / "x_{rollout_id}.pt")) == [0, 2, 10]
    assert list_ids(str(tmp_path / "x_0.pt")) == []


def test_glob_characters_in_a_template_are_literal(tmp_path):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    (folder / "x_3.pt").touch()
    assert list_ids(str(folder / "x_{rollout_id}.pt")) == [3]


def test_missing_ids_are_named_beside_those_that_exist(tmp_path):
    template = str(tmp_path / "x_{rollout_id}.pt")
    for i in (0, 1, 2):
        (tmp_path / f"x_{i}.pt").touch()
    assert missing_problem(template, [0, 1, 2]) is None
    assert missing_problem(template, [7]).endswith("no file for rollout_id 7; existing ids: 0-2")
    assert "there is no file for any id" in missing_problem(str(tmp_path / "z_{rollout_id}.pt"), [0])


def test_a_literal_path_is_good_for_exactly_one_rollout(tmp_path):
    (tmp_path / "x.pt").touch()
    assert missing_problem(str(tmp_path / "x.pt"), [5]) is None
    assert "one file, but 2 rollouts" in missing_problem(str(tmp_path / "x.pt"), [0, 1])
    assert "no such file" in missing_problem(str(tmp_path / "y.pt"), [0])
    assert missing_problem(str(tmp_path), [0]) == f"{tmp_path}: is no regular file"


def test_braces_of_a_name_are_written_twice(tmp_path):
    (tmp_path / "{x}").touch()
    assert missing_problem(f"{tmp_path}/{{{{x}}}}", [0]) is None
    (problem,) = check_template(f"{tmp_path}/{{x}}", 1)
    assert "unknown field {x}; a brace that belongs to the name is written twice" in problem


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("3", [3]),
        ("0:4", [0, 1, 2, 3]),
        ("2:", [2, 5]),
        (":2", [0, 1]),
        (":", [0, 1, 2, 5]),
        ("-1", [5]),
        ("-2:", [2, 5]),
        (":-1", [0, 1, 2]),
        (" 7 ", [7]),
    ],
)
def test_ids_are_one_number_or_a_range_as_in_python(text, ids):
    assert parse_ids(text, [0, 1, 2, 5]) == ids


@pytest.mark.parametrize("text", ["", " ", "a", "1,2", "1:2:3", "0-4", "4:2", "6:", "-9", "0:999999999", "1" * 30])
def test_ids_that_name_nothing_are_refused_beside_those_that_exist(text):
    with pytest.raises(UsageError, match="--ids"):
        parse_ids(text, [0, 1, 2, 5])


def test_a_range_without_files_says_so():
    with pytest.raises(UsageError, match="no file for any id"):
        parse_ids(":", [])
