"""Errors of the weight path cross process boundaries."""

import pickle

import pytest

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.weights import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.LayoutError("a"),
        errors.SharedMemoryError("a"),
        errors.StaleHandleError("/proc/1/fd/2", "gone"),
        errors.TornReadError("a"),
        errors.CacheBuildError("1 missing", ["w"], ["x"]),
        errors.VersionOrderError("a"),
        errors.NoTransportError(3, "GPU 1", ["host_shm: no", "nccl: no"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: RLixError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
