"""Worker extension of an engine: receives weights by every transport, and proves it.

vLLM makes it a base of its worker class, so its names carry a prefix. Arguments and
answers are pickled bytes: they pass vLLM's serializer whatever its settings are.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.accounting import ProcessMemory, nvml_charged_bytes
from nemo_rl_rlix.vllm.group import GroupSpec, TemporaryGroup, receive_batches
from nemo_rl_rlix.vllm.receive import WorkerReceive
from nemo_rl_rlix.vllm.update_features import UpdateFacts, refuse_unsupported
from nemo_rl_rlix.vllm.weight_state import (
    can_be_proved,
    find_unwritten,
    mark_unwritten,
    parameters_of,
)
from nemo_rl_rlix.weights.layout import payload_nbytes
from nemo_rl_rlix.weights.slot import host_staging
from nemo_rl_rlix.weights.staging import plan_staging
from nemo_rl_rlix.weights.transports.shm import ShmReceiver
from nemo_rl_rlix.weights.transports.staged import Named, device_staging
from nemo_rl_rlix.weights.types import BucketLayout, CacheHandle

logger = logging.getLogger(__name__)

Load = Callable[[list[Named]], None]


@dataclass(frozen=True)
class ExtensionConfig:
    """What a worker process must know of its shard.

    Attributes:
        pipeline_id: Pipeline of the shard.
        dp_rank: Rank of the shard.
        sleep_level: Level of a shrink.
        node_ids: Host name -> node id, for every node of the shard.
    """

    pipeline_id: str
    dp_rank: int
    sleep_level: int
    node_ids: dict[str, str]


@dataclass
class _State:
    """What the extension keeps; one for each worker process."""

    config: ExtensionConfig
    node_id: str
    receiver: ShmReceiver
    proved: set[frozenset[str]] = field(default_factory=set)
    update: ExitStack | None = None
    finalize: Callable[[], None] | None = None


class ShardExtension:
    """See the module. ``model_runner``, ``device`` and ``vllm_config`` are the worker's."""

    model_runner: Any
    vllm_config: Any
    device: Any
    _rlix_state: _State | None = None

    # -- what a binding overrides -----------------------------------------------

    def rlix_has_lifecycle(self) -> bool:
        """Whether :meth:`rlix_lifecycle` covers quantised weights and draft models."""
        return False

    def rlix_draft_from_disk(self) -> bool:
        """Whether the draft model's weights came from disk, once."""
        return False

    def rlix_load(self, weights: list[Named]) -> None:
        """Hand complete tensors to the model's loader, which copies what it keeps."""
        self.model_runner.model.load_weights(weights=iter(weights))

    @contextlib.contextmanager
    def rlix_lifecycle(self, transport: str) -> Iterator[Callable[[], None]]:
        """Surround one update; yields what finalizes it, to be called once.

        Args:
            transport: ``shm``, ``ipc`` or ``collective``.
        """
        yield self.rlix_process_weights

    def rlix_process_weights(self) -> None:
        """Let every layer make its run-time form of what was loaded."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        config = self.vllm_config
        with set_current_vllm_config(config):
            process_weights_after_loading(self.model_runner.model, config.model_config, self.device)

    def rlix_stream_ipc(self) -> frozenset[str]:
        """Receive and finalize from a sender's CUDA-IPC buffers; the names that arrived.

        Raises:
            RLixError: This worker has no such transport.
        """
        raise RLixError("this worker extension has no CUDA-IPC transport")

    # -- calls ------------------------------------------------------------------

    def rlix_attach(self, payload: bytes) -> bytes:
        """Tell the process which shard it is; the first call."""
        (config,) = pickle.loads(payload)
        refuse_unsupported(self._rlix_facts(), config.sleep_level)
        node_id = config.node_ids.get(socket.gethostname())
        if node_id is None:
            known = ", ".join(sorted(config.node_ids))
            raise RLixError(f"host {socket.gethostname()} is none of the shard's nodes ({known})")
        if self._rlix_state is None:
            self._rlix_state = _State(config, node_id, ShmReceiver(node_id))
        return pickle.dumps(self._rlix_model_names())

    def rlix_ping(self, payload: bytes) -> bytes:
        """Answer."""
        return pickle.dumps(True)

    def rlix_prepare(self, payload: bytes) -> bytes:
        """Map and register a slot of the cache, outside of any resize."""
        (handle,) = pickle.loads(payload)
        self._rlix().receiver.prepare(handle)
        return pickle.dumps(True)

    def rlix_receive_shm(self, payload: bytes) -> bytes:
        """Load a version from shared memory of the node."""
        handle: CacheHandle
        handle, timeout_s = pickle.loads(payload)
        device = torch.device(self.device)

        def transfer(load: Load) -> None:
            def loader(weights: Iterable[Named]) -> Iterable[str]:
                load(list(weights))
                return ()

            self._rlix().receiver.receive(handle, loader, device, timeout_s=timeout_s)

        report = self._rlix_update(
            "shm", _names(handle.layout), payload_nbytes(handle.layout), transfer
        )
        return pickle.dumps(_of_version(report, handle.weights_version))

    def rlix_receive_group(self, payload: bytes) -> bytes:
        """Load a version that a trainer broadcasts over a temporary group."""
        spec: GroupSpec
        layout: BucketLayout
        spec, rank, layout, version, timeout_s = pickle.loads(payload)
        device = torch.device(self.device)
        allocate = device_staging(device) if device.type == "cuda" else host_staging
        plan = plan_staging(layout)

        def transfer(load: Load) -> None:
            with TemporaryGroup(spec, rank, timeout_s=timeout_s) as group:
                batches = receive_batches(group, plan, layout.total_nbytes, device, allocate)
                with contextlib.closing(batches):
                    for batch in batches:
                        load(batch)

        report = self._rlix_update("collective", _names(layout), payload_nbytes(layout), transfer)
        return pickle.dumps(_of_version(report, version))

    def rlix_receive_ipc(self, payload: bytes) -> bytes:
        """Load a version from a sender's CUDA-IPC buffers (the sender's own protocol)."""
        version, names, nbytes = pickle.loads(payload)
        started = time.monotonic()
        proof = self._rlix_begin_proof(frozenset(names))
        arrived = self.rlix_stream_ipc()
        loaded, expected = self._rlix_end_proof(proof, frozenset(names), arrived)
        return pickle.dumps(
            WorkerReceive(version, loaded, expected, nbytes, time.monotonic() - started)
        )

    def rlix_finalize(self, payload: bytes) -> bytes:
        """Run post-load work, once for each update, and free transfer staging."""
        state = self._rlix()
        update, state.update = state.update, None
        finalize, state.finalize = state.finalize, None
        if update is not None:
            with update:
                if finalize is not None:
                    finalize()
        # No collection of garbage: it takes longer than the whole of a small sync.
        if torch.cuda.is_available():
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        return pickle.dumps(update is not None)

    def rlix_memory(self, payload: bytes) -> bytes:
        """Device memory of this process."""
        return pickle.dumps(self._rlix_process_memory())

    # -- helpers ----------------------------------------------------------------

    def _rlix(self) -> _State:
        if self._rlix_state is None:
            raise RLixError("the worker process was not told which shard it is: rlix_attach first")
        return self._rlix_state

    def _rlix_facts(self) -> UpdateFacts:
        config = self.vllm_config
        quantization = config.model_config.quantization
        speculative = config.speculative_config
        return UpdateFacts(
            quantization=str(quantization or ""),
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            draft_method=str(speculative.method) if speculative is not None else "",
            draft_has_weights=len(self._rlix_models()) > 1,
            draft_from_disk=self.rlix_draft_from_disk(),
            lifecycle=self.rlix_has_lifecycle(),
        )

    def _rlix_models(self) -> dict[str, torch.nn.Module]:
        models = {"": self.model_runner.model}
        draft = compat.draft_model(self.model_runner)
        if draft is not None:
            models["draft."] = draft
        return models

    def _rlix_model_names(self) -> frozenset[str]:
        return frozenset(parameters_of(self._rlix_models()))

    def _rlix_update(
        self, transport: str, names: frozenset[str], nbytes: int, transfer: Callable[[Load], None]
    ) -> WorkerReceive:
        state = self._rlix()
        self._rlix_drop_update()
        started = time.monotonic()
        arrived: set[str] = set()

        def load(weights: list[Named]) -> None:
            arrived.update(name for name, _ in weights)
            self.rlix_load(weights)

        proof = self._rlix_begin_proof(names)
        with ExitStack() as stack:
            lifecycle: AbstractContextManager[Callable[[], None]] = self.rlix_lifecycle(transport)
            finalize = stack.enter_context(lifecycle)
            with torch.inference_mode(False), torch.no_grad():
                transfer(load)
            if torch.cuda.is_available():
                torch.cuda.synchronize(self.device)
            loaded, expected = self._rlix_end_proof(proof, names, frozenset(arrived))
            # Kept open until rlix_finalize: the caller checks what arrived in between.
            state.update, state.finalize = stack.pop_all(), finalize
        return WorkerReceive(-1, loaded, expected, nbytes, time.monotonic() - started)

    def _rlix_drop_update(self) -> None:
        """Close an update that was never finalized, because its coverage was incomplete."""
        state = self._rlix()
        update, state.update, state.finalize = state.update, None, None
        if update is not None:
            update.close()

    def _rlix_begin_proof(self, names: frozenset[str]) -> dict[str, torch.nn.Parameter] | None:
        """Mark every parameter, unless this set of names has been proved before."""
        parameters = parameters_of(self._rlix_models())
        if names in self._rlix().proved or not self._rlix_can_be_proved(parameters):
            return None
        mark_unwritten(parameters)
        return parameters

    def _rlix_can_be_proved(self, parameters: dict[str, torch.nn.Parameter]) -> bool:
        return not self.vllm_config.model_config.quantization and can_be_proved(parameters)

    def _rlix_end_proof(
        self,
        proof: dict[str, torch.nn.Parameter] | None,
        names: frozenset[str],
        arrived: frozenset[str],
    ) -> tuple[frozenset[str], frozenset[str]]:
        """``(loaded, expected)`` of the engine's tensors."""
        if proof is not None:
            expected = frozenset(proof)
            loaded = expected - find_unwritten(proof)
            if loaded == expected and arrived == names:
                self._rlix().proved.add(names)
            return loaded, expected
        expected = self._rlix_model_names()
        if arrived == names:
            return expected, expected
        # The same loader on fewer names: which parameters lack something is not known.
        return frozenset(), expected | (names - arrived)

    def _rlix_process_memory(self) -> ProcessMemory:
        if not torch.cuda.is_available():
            return ProcessMemory({}, frozenset(), 0, 0, 0, socket.gethostname(), "cpu")
        from vllm.third_party import pynvml

        free, total = torch.cuda.mem_get_info(self.device)
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        # The worker class that knows, see gpu_worker; another one never unmaps.
        unmapped: frozenset[str] = getattr(self, "rlix_unmapped_tags", frozenset())
        return ProcessMemory(
            pool_bytes=compat.pool_bytes_by_tag(),
            unmapped_tags=unmapped,
            reserved_bytes=torch.cuda.memory_reserved(self.device),
            charged_bytes=nvml_charged_bytes(pynvml, uuid),
            device_used_bytes=total - free,
            node=socket.gethostname(),
            device=uuid,
        )


def _names(layout: BucketLayout) -> frozenset[str]:
    return frozenset(spec.name for spec in layout.tensors)


def _of_version(report: WorkerReceive, version: int) -> WorkerReceive:
    return WorkerReceive(version, report.loaded, report.expected, report.nbytes, report.seconds)
