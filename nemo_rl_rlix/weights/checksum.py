"""Checksums of a slot.

Off, a checksum ties layout, version and memory together and costs nothing; on,
it covers the bytes as well, by sums of 64-bit words taken bucket by bucket.
"""

from __future__ import annotations

import hashlib

import torch

from nemo_rl_rlix.weights.layout import layout_digest
from nemo_rl_rlix.weights.types import BucketLayout


def slot_checksum(
    layout: BucketLayout, weights_version: int, nonce: str, slot: torch.Tensor | None
) -> str:
    """Checksum of one version in one slot.

    Args:
        layout: Layout of the slot.
        weights_version: Version that it holds.
        nonce: Nonce of its memory.
        slot: Bytes of the slot, ``torch.uint8[total_nbytes]``; ``None`` leaves
            them out.
    """
    digest = hashlib.sha256(f"{layout_digest(layout)}:{weights_version}:{nonce}".encode())
    if slot is None:
        return f"meta:{digest.hexdigest()}"
    for offset, nbytes in zip(layout.bucket_offsets, layout.bucket_nbytes, strict=True):
        bucket = slot[offset : offset + nbytes]
        whole = nbytes // 8 * 8
        words = int(bucket[:whole].view(torch.int64).sum()) & (1 << 64) - 1
        digest.update(words.to_bytes(8, "little"))
        digest.update(bytes(bucket[whole:].tolist()))
    return f"data:{digest.hexdigest()}"
