"""Which versions are known, and what is said of the others."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from fake_package import write_fake

from nemo_rl_rlix.errors import UnsupportedVersionError
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl, check_vllm, detect, package_number, release

INFO = "nemo_rl/package_info.py"


def tree(root: Path, version: str, **edits: tuple[str, str]) -> SourceTree:
    return SourceTree(write_fake(root, version, edits) / "nemo_rl")


@pytest.mark.parametrize(("fake", "version"), [("main", NemoRl.MAIN), ("v0.7.0", NemoRl.V0_7_0)])
def test_the_known_ones(tmp_path: Path, fake: str, version: NemoRl) -> None:
    assert detect(tree(tmp_path, fake)) is version


def test_a_number_alone_does_not_make_main(tmp_path: Path) -> None:
    sources = tree(tmp_path, "main")
    (sources.package_dir / "models" / "generation" / "fleet_health.py").unlink()
    with pytest.raises(UnsupportedVersionError) as caught:
        detect(sources)
    assert caught.value.version == "0.6.0"
    ((file, symbol, reason),) = caught.value.places
    assert file.endswith("models/generation/fleet_health.py")
    assert symbol == "nemo_rl.models.generation.fleet_health.GenerationFleetHealth"
    assert reason == "does not exist (as in main at 7ea279abf)"


@pytest.mark.parametrize(("old", "new"), [("MINOR = 7", "MINOR = 8"), ("MAJOR = 0", "MAJOR = 1")])
def test_other_numbers_are_refused(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(UnsupportedVersionError, match="is none of main at 7ea279abf, v0") as caught:
        detect(tree(tmp_path, "v0.7.0", **{INFO: (old, new)}))
    assert "v0.7.0" in caught.value.remedy


def test_a_package_without_numbers_is_refused(tmp_path: Path) -> None:
    sources = tree(tmp_path, "v0.7.0", **{INFO: ("PATCH = 0", "")})
    assert package_number(sources) is None
    with pytest.raises(UnsupportedVersionError, match="of unknown version"):
        detect(sources)


def test_the_error_survives_pickling(tmp_path: Path) -> None:
    error = UnsupportedVersionError("X", "1", places=[("f", "s", "r")], remedy="do")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.places, again.version) == (str(error), error.places, "1")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.25.1", (0, 25, 1)),
        ("0.25", (0, 25, 0)),
        ("0.20.0+cu129", (0, 20, 0)),
        ("0.25.1.dev3+g7", (0, 25, 1)),
        ("0.26.0rc1", (0, 26, 0)),
    ],
)
def test_release(text: str, numbers: tuple[int, int, int]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize("version", ["0.20.0", "0.25.1", "0.25.9+cpu"])
def test_vllm_in_range(version: str) -> None:
    check_vllm(("vllm", version))


def test_no_vllm_in_the_driver_is_fine() -> None:
    check_vllm(None)


@pytest.mark.parametrize("version", ["0.17.1", "0.19.9", "0.26.0", "1.0.0"])
def test_vllm_out_of_range(version: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"not in \[0.20.0, 0.26.0\)") as caught:
        check_vllm(("vllm", version))
    assert version in str(caught.value)
