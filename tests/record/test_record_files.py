"""Which files a template names, and what is said where it names none. Case P12."""

import pytest

from vime.errors import UsageError
from vime.record.files import record_files, templates_in


@pytest.fixture
def folder(tmp_path):
    for name in ("data_0.pt", "data_1.pt", "data_2.pt", "eval_000004.pt", "other.pt", "notes.txt"):
        (tmp_path / name).touch()
    return tmp_path


def names(files):
    return [(file.path.name, file.rollout_id) for file in files]


def refused(template, ids=None):
    with pytest.raises(UsageError) as error:
        record_files(template, ids)
    return error.value


def test_a_template_names_its_files_and_ids_choose(folder):
    template = f"{folder}/data_{{rollout_id}}.pt"
    assert names(record_files(template)) == [("data_0.pt", 0), ("data_1.pt", 1), ("data_2.pt", 2)]
    assert names(record_files(template, "1:")) == [("data_1.pt", 1), ("data_2.pt", 2)]
    assert names(record_files(template, "-1")) == [("data_2.pt", 2)]


def test_a_literal_path_is_one_file(folder):
    assert names(record_files(f"{folder}/other.pt")) == [("other.pt", None)]
    assert "is one file; ids need {rollout_id}" in refused(f"{folder}/other.pt", "0").message


def test_an_id_that_is_missing_is_named_beside_those_that_exist(folder):
    problem = refused(f"{folder}/data_{{rollout_id}}.pt", "7").message
    assert problem.endswith("no file for rollout_id 7; existing ids: 0-2")


def test_a_folder_and_a_wrong_name_are_answered_with_the_templates_that_are_there(folder):
    there = f"{folder}/data_{{rollout_id}}.pt, {folder}/eval_{{rollout_id:06d}}.pt, {folder}/other.pt"
    for wrong in (folder, folder / "date_{rollout_id}.pt", folder / "date_0.pt"):
        assert refused(str(wrong)).hint == f"records here: {there}"
    assert "is a folder" in refused(str(folder)).message
    assert "no file for any id" in refused(f"{folder}/date_{{rollout_id}}.pt").message
    assert "no such file" in refused(f"{folder}/date_0.pt").message
    assert "written by vime rollout --save" in refused(f"{folder}/none/x.pt").hint


def test_the_templates_of_a_folder_open_its_files(folder):
    assert all(record_files(template) for template in templates_in(folder))


def test_training_records_are_no_records_to_look_at(folder):
    before = templates_in(folder)
    for i in range(9):
        (folder / f"data_{i}.train.pt").write_bytes(b"")
    assert templates_in(folder) == before


def test_another_placeholder_is_refused(folder):
    assert "unknown field {id}" in refused(f"{folder}/data_{{id}}.pt").message


def test_what_is_no_regular_file_is_not_said_to_be_missing(folder):
    assert "/dev/null: is no regular file" in refused("/dev/null").message
