"""Plots as plain data: what is cut, what is not finite, and bins counted by hand."""

import json

import numpy as np

from vime.align.plots import MAX_POINTS, bars, histogram, line, scatter, steps


def plain(plot):
    return json.loads(json.dumps(plot.as_dict(), allow_nan=False))


def test_a_scatter_keeps_the_largest_and_says_what_it_left_out():
    gaps = np.arange(MAX_POINTS + 5, dtype=np.float32) - 2
    gaps[0] = np.nan
    drawn = plain(scatter("gap", {"engine": gaps}, "token", "nats", limit=1e-5, limit_text="float32"))
    (series,) = drawn["series"]
    assert len(series["y"]) == MAX_POINTS
    assert series["y"][0] is None  # what is not finite is the worst and stays
    assert set(range(MAX_POINTS + 5)) - set(series["x"]) == {1, 2, 3, 4, 5}  # of sizes 1 0 1 2 3
    assert drawn["note"] == "engine: the 10000 largest of 10005 are drawn; engine: 1 not finite"
    assert (drawn["kind"], drawn["limit"], drawn["is_log"]) == ("scatter", 1e-5, True)


def test_texts_stay_with_their_points():
    given = {"a": [3.0, 1.0], "b": [2.0]}
    drawn = plain(scatter("gap", given, "token", "nats", at={"a": [7, 9]}, texts={"a": ["x", "y"]}, is_log=False))
    assert drawn["series"] == [
        {"name": "a", "x": [7, 9], "y": [3.0, 1.0], "texts": ["x", "y"]},
        {"name": "b", "x": [0], "y": [2.0], "texts": []},
    ]


def test_bins_are_shared_and_counted():
    drawn = plain(histogram("log-prob", {"a": [0, 1, 2, 4], "b": [4.0, np.inf]}, "nats", num_bins=2))
    assert [s["x"] for s in drawn["series"]] == [[0.0, 2.0, 4.0]] * 2
    assert [s["y"] for s in drawn["series"]] == [[2, 2], [0, 1]]
    assert drawn["note"] == "b: 1 not finite"
    assert plain(histogram("none", {"a": []}, "nats"))["series"][0]["y"] == [0]


def test_names_along_x():
    assert plain(bars("d", {"w": 1, "v": None}, "tensor", "max"))["series"][0]["x"] == ["w", "v"]
    assert plain(line("d", {"e": [1, 2]}, "layer", "max", at=["0", "1"]))["series"][0]["x"] == ["0", "1"]
    ledger = plain(steps("m", {"rank 0": [1, 2], "rank 1": [1, 3]}, ["0 train", "0 sync"], "phase", "MiB"))
    assert [s["y"] for s in ledger["series"]] == [[1, 2], [1, 3]]
