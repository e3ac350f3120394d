import json
import platform

import pytest
from pydantic import ValidationError

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.observe.records import (
    Record,
    collect_versions,
    command_line,
    cpu_model,
    describe_hardware,
    load_records,
    memory_gib,
    merge_records,
    usable_cores,
    write_records,
)


def record(metric="a", value=1.0, **params):
    return Record(metric=metric, value=value, unit="s", params=params)


def test_a_record_of_the_same_thing_is_replaced_in_its_place():
    old = [record(value=1, mode="alone"), record(value=2, mode="shared"), record("b", 3)]
    merged = merge_records(old, [record(value=9, mode="shared"), record("c", 4)])
    assert [(r.metric, r.value) for r in merged] == [("a", 1), ("a", 9), ("b", 3), ("c", 4)]


def test_the_order_of_params_does_not_matter():
    assert record(a=1, b=2).key == record(b=2, a=1).key
    assert record(a=1).key != record(a=2).key


def test_writing_merges_into_the_file(tmp_path):
    path = tmp_path / "deep" / "records.json"
    write_records(path, [record(value=1, pipeline="p0"), record("b", 5)])
    write_records(path, [record(value=2, pipeline="p0")])
    rows = json.loads(path.read_text())
    assert [(row["metric"], row["value"]) for row in rows] == [("a", 2), ("b", 5)]
    assert set(rows[0]) == {
        *("metric", "value", "unit", "reference", "spread", "n", "params"),
        *("versions", "hardware", "command", "date"),
    }
    assert load_records(path)[0] == record(value=2, pipeline="p0")
    assert [p.name for p in path.parent.iterdir()] == ["records.json"]


@pytest.mark.parametrize("text", ["", "{}", '[{"metric": "a"}]', "[1]"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SettingError, match="not a list of records"):
        write_records(path, [record()])
    assert path.read_text() == text


@pytest.mark.parametrize(
    "wrong", [{"metric": "Bad name"}, {"value": float("nan")}, {"n": 0}, {"colour": 1}]
)
def test_what_is_no_record_is_refused(wrong):
    with pytest.raises(ValidationError):
        Record.model_validate({"metric": "a", "value": 1.0, "unit": "s", **wrong})


def test_versions_name_python_and_what_is_installed():
    versions = collect_versions()
    assert versions["python"] == platform.python_version()
    assert {"torch", "ray", "numpy"} <= set(versions)


def test_hardware_never_holds_the_name_of_the_machine():
    hardware = describe_hardware()
    assert set(hardware) == {"cpu", "cores", "memory_gib"}
    assert platform.node() not in {str(value) for value in hardware.values()}
    assert hardware["cores"] > 0


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [(8, "max 100000\n", 8), (8, "200000 100000\n", 2), (2, "800000 100000", 2), (4, "", 4)],
)
def test_cores_are_the_smaller_of_mask_and_quota(affinity, cpu_max, cores):
    assert usable_cores(affinity, cpu_max) == cores


@pytest.mark.parametrize(
    ("meminfo", "memory_max", "gib"),
    [
        ("MemTotal:  8388608 kB\nMemFree: 1 kB", "max\n", 8),
        ("MemTotal:  8388608 kB", f"{2 * 2**30}\n", 2),
        ("", "", 0),
    ],
)
def test_memory_is_the_smaller_limit(meminfo, memory_max, gib):
    assert memory_gib(meminfo, memory_max) == gib


def test_cpu_model():
    assert cpu_model("processor : 0\nmodel name\t: A CPU @ 2 GHz\n") == "A CPU @ 2 GHz"
    assert cpu_model("processor : 0\n") == ""


def test_the_command_is_without_the_folder_of_its_program():
    argv = ["/some/where/bin/nemo-rl-rlix", "demo", "--out", "a b"]
    assert command_line(argv) == "nemo-rl-rlix demo --out 'a b'"
    assert command_line([]) == ""
