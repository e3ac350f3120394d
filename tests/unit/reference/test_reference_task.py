from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.reference.task import (
    CountingTask,
    FileTask,
    Problem,
    Workload,
    load_problems,
    make_task,
    reward,
    verifier_seconds,
)
from nemo_rl_rlix.reference.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, decode, encode

COUNT = Problem("c7+3=", "c0b3a6", stride=2)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_text_survives_the_tokenizer(text: str) -> None:
    assert decode((*encode(text), EOS_ID, PAD_ID)) == text
    assert all(token < PAD_ID for token in encode(text))
    assert VOCAB_SIZE <= 100


@pytest.mark.parametrize("text", ["tab\t", "é", "\n", "\x7f"])
def test_other_characters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        encode(text)


@pytest.mark.parametrize(
    ("response", "finished", "expected"),
    [
        ("c0b3a6", True, 1.0),
        ("c0b3a6", False, 0.75),  # right, but never ended
        ("c0b3a6z", True, 0.75),
        ("c0b3", True, 0.5),
        ("c0b4a6", True, 0.25),  # right after a mistake counts no more
        ("d0b3a6", True, 0.0),
        ("", True, 0.0),
        ("c", True, 0.0),
    ],
)
def test_reward(response: str, finished: bool, expected: float) -> None:
    assert reward(COUNT, response, finished=finished) == expected


@given(st.text("abc0123456789", max_size=12), st.booleans())
def test_only_the_right_answer_gets_everything(response: str, finished: bool) -> None:
    score = reward(COUNT, response, finished=finished)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (response == COUNT.answer and finished)


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(0, 7))
def test_the_answer_counts_as_the_prompt_says(seed: int, step: int, index: int) -> None:
    problem = CountingTask(Workload(), seed).problem(step, index)
    terms, value, stride = ord(problem.prompt[0]) - 96, int(problem.prompt[1]), problem.prompt[3]
    assert len(problem.answer) == 2 * terms
    for place in range(terms):
        value = (value + int(stride)) % 10
        assert problem.answer[2 * place + 1] == str(value)
        assert ord(problem.answer[2 * place]) - 96 == terms - place


def test_problems_depend_on_seed_and_place_alone() -> None:
    workload = Workload()
    one, two, other = (CountingTask(workload, seed) for seed in (1, 1, 2))
    places = [(step, index) for step in range(3) for index in range(8)]
    expected = [one.problem(*place) for place in places]
    assert [two.problem(*place) for place in reversed(places)][::-1] == expected
    assert [other.problem(*place) for place in places] != expected


def test_lengths_have_a_long_tail_and_fit() -> None:
    workload = Workload()
    task = CountingTask(workload, 0)
    lengths = [len(task.problem(step, i).answer) for step in range(60) for i in range(8)]
    assert max(lengths) + 1 <= workload.max_new_tokens
    assert max(lengths) >= 4 * statistics.median(lengths)
    assert 0.01 <= sum(length >= 40 for length in lengths) / len(lengths) <= 0.15


def test_steps_are_alike() -> None:
    task = CountingTask(Workload(), 0)
    means = [statistics.mean(len(task.problem(s, i).answer) for i in range(8)) for s in range(40)]
    rng = random.Random(0)
    apart = [statistics.mean(len(task.practice(rng).answer) for _ in range(8)) for _ in range(40)]
    assert statistics.stdev(means) < 0.6 * statistics.stdev(apart)


def test_slips_carry_on() -> None:
    task, rng = CountingTask(Workload(), 0), random.Random(0)
    assert task.flawed_answer(COUNT, rng, 0.0) == COUNT.answer
    flawed = [task.flawed_answer(COUNT, rng, 0.5) for _ in range(300)]
    assert all(len(answer) == 6 and answer[::2] == "cba" for answer in flawed)
    wrong_first = [a for a in flawed if a[1] != "0"]
    kept_counting = [a for a in wrong_first if (int(a[1]) + 3) % 10 == int(a[3])]
    assert 0.35 < len(kept_counting) / len(wrong_first) < 0.75


def test_verifier_time_is_long_tailed_and_the_same_in_every_run() -> None:
    workload = Workload(verifier_median_s=0.5, verifier_sigma=0.8, verifier_max_s=4.0)
    seconds = [verifier_seconds(workload, 3, f"t{i}") for i in range(500)]
    assert seconds == [verifier_seconds(workload, 3, f"t{i}") for i in range(500)]
    assert seconds != [verifier_seconds(workload, 4, f"t{i}") for i in range(500)]
    assert 0.4 < statistics.median(seconds) < 0.6
    assert 2.0 < max(seconds) <= 4.0
    assert verifier_seconds(Workload(verifier_median_s=0), 3, "t0") == 0.0


# -- files ------------------------------------------------------------------------


def test_a_file_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "2+2=", "answer": "4"}\n')
    assert load_problems(path) == (Problem("1+1=", "2"), Problem("2+2=", "4"))


def test_a_file_of_problems_from_windows(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1=", "answer": "2"}\r\n\r\n')
    assert load_problems(path) == (Problem("1+1=", "2"),)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "1\u2028", "answer": "2"}', "printable ASCII"),
        ("[1]", "list"),
        ('{"prompt": "1"}', "'answer'"),
        ('{"prompt": "1", "answer": 2}', "got 2"),
        ('{"prompt": "", "answer": "2"}', "'prompt'"),
        ('{"prompt": "é", "answer": "2"}', "printable ASCII"),
        (f'{{"prompt": "{"1" * 999}", "answer": "2"}}', "999 characters"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    with pytest.raises(SettingError, match=reason) as caught:
        load_problems(path)
    assert f"{path}:2" in str(caught.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe")
    for path in (empty, binary, tmp_path / "missing"):
        with pytest.raises(SettingError, match=str(path)):
            load_problems(path)


def test_an_answer_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "0123456789"}\n')
    with pytest.raises(SettingError, match="max_new_tokens=10. Shorten that answer to 9"):
        make_task(path, Workload(max_new_tokens=10), 0)
    assert isinstance(make_task(path, Workload(max_new_tokens=11), 0), FileTask)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 99))
def test_a_file_is_used_up_before_it_repeats(size: int, per_step: int, seed: int) -> None:
    problems = [Problem(f"{i}=", str(i)) for i in range(size)]
    task = FileTask(problems, Workload(prompts_per_step=per_step), seed)
    drawn = [task.problem(step, i) for step in range(size) for i in range(per_step)]
    for first in range(0, len(drawn), size):
        assert set(drawn[first : first + size]) == set(problems)
