"""Allocates the blocks of a paged key/value cache, and finds blocks by content (Kwon et al., 2023)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns a digest of a block's tokens and of all earlier tokens of the sequence.

    Args:
        parent: the digest of the previous block. For a sequence's first block: bytes that differ between sequences that
            must not share blocks.
        tokens: the token ids of the block.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Tracks the blocks of a cache: which are free, how many sequences use each, and what they contain.

    A block that no sequence uses any more keeps its content until the block is taken again, and can be shared until
    then. Free blocks without known content are taken first, then the block that has been unused for the longest time.

    Args:
        blocks: number of blocks.

    Attributes:
        pending: digests of the blocks that sequences are computing now.
    """

    def __init__(self, blocks: int):
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(blocks))
        self._users = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks
        self._by_digest: dict[bytes, int] = {}
        self.pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._users)

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """Indices of the blocks that no sequence uses."""
        return list(self._free)

    def grow(self, blocks: int) -> None:
        """Increases the number of blocks to `blocks`. New blocks are taken first."""
        for block in range(len(self), blocks):
            self._users.append(0)
            self._digests.append(None)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def take(self) -> int:
        """Takes a free block, forgets the block's content, and returns the block's index.

        Raises:
            IndexError: no block is free.
        """
        if not self._free:
            raise IndexError("no block is free")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._users[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """Returns the index of the block with this digest, and counts one more sequence that uses the block.

        Returns None if there is no such block.
        """
        block = self._by_digest.get(digest)
        if block is not None:
            self._free.pop(block, None)
            self._users[block] += 1
        return block

    def contains(self, digest: bytes) -> bool:
        """Whether a block with this digest exists."""
        return digest in self._by_digest

    def publish(self, block: int, digest: bytes) -> None:
        """Records the digest of a complete block, so that `share` finds it, unless another block has this digest."""
        self.pending.discard(digest)
        if digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Releases blocks of one sequence. Of the blocks that become free, the last ones are taken again first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def clear(self) -> None:
        """Forgets the content of all blocks, for example because the model's weights have changed."""
        for block in range(len(self)):
            self._forget(block)

    def _forget(self, block: int) -> None:
        digest, self._digests[block] = self._digests[block], None
        if digest is not None:
            del self._by_digest[digest]
