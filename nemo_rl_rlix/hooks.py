"""The four calls by which a training loop tells a scheduler where it is."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class RLixHooks(Protocol):
    """Life-cycle hooks of one pipeline.

    ``before_training`` and ``after_training`` are called by the training loop,
    ``report_progress`` and ``clear_progress`` by the trajectory collector. The
    former two may block; the latter two never do.
    """

    def before_training(self, step: int) -> None:
        """Return once the training GPUs are granted and ready for ``step``.

        Args:
            step: Number of the training step, from 0.

        Raises:
            RLixError: The grant cannot be had any more; the run must end.
        """
        ...

    def after_training(self, step: int) -> None:
        """Publish the weights of ``step`` and give the training GPUs back.

        Args:
            step: Number of the step that has just been trained.
        """
        ...

    def report_progress(self, collected: int, target: int) -> None:
        """Record a snapshot of generation demand.

        Args:
            collected: Trajectories that have been generated, at most ``target``.
            target: Trajectories wanted at this moment, over all target versions
                that may be filled.
        """
        ...

    def clear_progress(self) -> None:
        """State that nothing can be wanted until the next report."""
        ...


class NoOpRLixHooks:
    """Hooks of a run that shares nothing: every call returns at once."""

    def before_training(self, step: int) -> None:
        """Do nothing."""

    def after_training(self, step: int) -> None:
        """Do nothing."""

    def report_progress(self, collected: int, target: int) -> None:
        """Do nothing."""

    def clear_progress(self) -> None:
        """Do nothing."""
