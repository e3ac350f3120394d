"""How the communicators of a group are freed and come back."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from nemo_rl_rlix.megatron.errors import WarmUpError
from nemo_rl_rlix.megatron.groups import ReloadableGroup


class CommunicatorStrategy(Protocol):
    """One way to free the device memory of communicators and to get them back.

    A strategy that suspends them instead (``Backend.suspend`` and ``resume`` of later
    torch and NCCL) has the same three calls. It would be faster and frees less:
    NVLS and registered buffers stay (NVIDIA/nccl#2337).
    """

    def release(self, group: ReloadableGroup) -> None:
        """Free what the group holds on the device; all its ranks call this."""
        ...

    def restore(self, group: ReloadableGroup, generation: int) -> None:
        """Make the group usable again; all its ranks call this."""
        ...

    def warm_up(self, group: ReloadableGroup) -> None:
        """Create its communicator now, by a first collective."""
        ...


class RebuildStrategy:
    """Destroy the communicators and make new ones."""

    def release(self, group: ReloadableGroup) -> None:
        """Take the group down."""
        group.take_down()

    def restore(self, group: ReloadableGroup, generation: int) -> None:
        """Bring the group up."""
        group.bring_up(generation)

    def warm_up(self, group: ReloadableGroup) -> None:
        """Sum a one over the group, on every device type that it serves.

        NCCL makes a communicator at the first collective, and allocates for it: that
        is to happen now, while memory is free, not in the middle of a step
        (modelscope/ms-swift#9486).

        Raises:
            WarmUpError: The sum is not the number of ranks.
        """
        for device in warm_up_devices(group):
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            found = int(one.item())
            if found != group.size():
                raise WarmUpError(
                    f"{group.label} on {device}: {found} of {group.size()} ranks answered"
                )


def warm_up_devices(group: ReloadableGroup) -> list[torch.device]:
    """One device for each backend of a group; a gloo group is tried on the host only."""
    devices: list[torch.device] = []
    for recipe in group.recipes:
        on_host = recipe.kind == "gloo"
        devices.append(torch.device("cpu" if on_host else recipe.devices[0].type))
    return devices
