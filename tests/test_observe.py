"""Samples and verdicts as a person reads them."""

import numpy as np

from vime.observe import brief, describe, show
from vime.types import CheckResult, Sample, Verdict

CHAT = (
    "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
    "<|im_start|>user\nWhat is 4 plus 2?<|im_end|>\n<|im_start|>assistant\n"
)


def test_a_prompt_on_one_line():
    assert brief(CHAT, 60) == r"Answer briefly.\nWhat is 4 plus 2?"
    assert brief(CHAT, 17) == "...What is 4 plus 2?"
    assert brief("4 + 2 = 6\n\nThis recursive process", 12, False) == r"4 + 2 = 6\nT..."


def test_a_sample_without_a_reward():
    sample = Sample(3, 1, np.arange(2), 1, [False, True], np.zeros(2), text="6", prompt_text="4+2=")
    assert show(sample) == "sample 3/1 reward none: 4+2= -> 6"


def test_only_a_failed_check_says_what_to_try():
    failed = CheckResult("a == b", Verdict.FAIL, "1 differs", "bitwise", ("token 7",), "a kernel", "flash")
    assert describe(failed) == "FAIL  a == b: 1 differs (limit: bitwise)\n  token 7\n  likely: a kernel\n  try: flash"
    assert describe(CheckResult("a == b", Verdict.SKIP, cause="no reference")) == "SKIP  a == b: no reference"
