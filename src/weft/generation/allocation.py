"""Allocates the blocks of paged caches to sequences."""

from __future__ import annotations

from collections.abc import Sequence

from weft.generation.blocks import BlockPool, block_digest
from weft.generation.cache import BLOCK, PagedCache
from weft.generation.sequence import GeneratedSequence


class BlockAllocator:
    """Gives blocks to sequences, shares them between sequences that begin with the same tokens, and releases them.

    Args:
        caches: the caches of the model and of a draft model. A block has the same index in each cache. If the list is
            empty, sequences have no blocks.
        most: maximum number of blocks per cache.
        share: whether sequences share blocks.

    Attributes:
        pool: tracks which blocks are free, and what the blocks contain.
    """

    def __init__(self, caches: Sequence[PagedCache], most: int, share: bool):
        self.caches, self.most, self.share = caches, most, share
        self.pool = BlockPool(0)
        # Keys that no layer sees any more are released, unless a layer has full attention.
        windows = [window for cache in caches for window in cache.windows]
        self._window = None if not windows or None in windows else max(w for w in windows if w is not None)

    def admit(self, sequence: GeneratedSequence, length: int, *, take: bool, wait: bool) -> bool:
        """Gives a new sequence the cached blocks that contain its first tokens, and checks that enough blocks are free.

        Args:
            sequence: the sequence, without blocks.
            length: number of tokens that the sequence needs blocks for.
            take: whether to take all other blocks for these tokens now.
            wait: whether the sequence must wait if too few blocks are free, because running sequences will free blocks.

        Returns:
            Whether the sequence can start. If not, it gets no blocks: it must wait for free blocks, or for a block that
            another sequence is computing and that the two sequences will share.
        """
        if not self.caches:
            return True
        shares, tokens = sequence.shares and self.share, sequence.tokens
        parent, found = sequence.root, []
        for begin in range(0, len(tokens) - BLOCK if shares else 0, BLOCK):  # at least one token must be computed
            digest = block_digest(parent, tokens[begin : begin + BLOCK])
            if digest in self.pool.pending:
                return False
            if not self.pool.contains(digest):
                break
            found.append(parent := digest)
        needed = -(-length // BLOCK) - len(found)
        shared = [self.pool.share(digest) for digest in found]
        sequence.blocks = [block for block in shared if block is not None]
        self._grow(needed)
        if self.pool.free < needed and wait:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
            return False
        if take:
            sequence.blocks.extend(self.pool.take() for _ in range(needed))
        sequence.digests, sequence.computed = found, len(found) * BLOCK
        for begin in range(len(found) * BLOCK, len(tokens) - BLOCK + 1 if shares else 0, BLOCK):
            parent = block_digest(parent, tokens[begin : begin + BLOCK])
            sequence.pending.append(parent)
        self.pool.pending.update(sequence.pending)
        return True

    def reserve(self, sequence: GeneratedSequence, end: int) -> bool:
        """Takes the missing blocks for a sequence's first `end` tokens. Returns False if too few blocks are free."""
        needed = -(-end // BLOCK) - len(sequence.blocks) if self.caches else 0
        self._grow(needed)
        if self.pool.free < needed:
            return False
        sequence.blocks.extend(self.pool.take() for _ in range(needed))
        return True

    def publish(self, sequence: GeneratedSequence, computed: int) -> None:
        """Records the digests of a sequence's complete blocks, so that other sequences can share the blocks.

        If all layers have sliding windows, releases the blocks before the windows.

        Args:
            computed: number of tokens of the sequence that are in all caches.
        """
        if not self.caches:
            return
        while sequence.shares and self.share and (len(sequence.digests) + 1) * BLOCK <= computed:
            begin = len(sequence.digests) * BLOCK
            parent = sequence.digests[-1] if sequence.digests else sequence.root
            digest = block_digest(parent, sequence.tokens[begin : begin + BLOCK])
            self.pool.publish(sequence.blocks[begin // BLOCK], digest)
            sequence.digests.append(digest)
        if self._window is not None:
            for i in range(max(0, computed - self._window + 1) // BLOCK):
                if sequence.blocks[i] >= 0:
                    self.pool.release([sequence.blocks[i]])
                    sequence.blocks[i] = -1

    def release(self, sequence: GeneratedSequence) -> None:
        """Releases all blocks of a sequence. To continue the sequence, all its tokens must be recomputed."""
        self.pool.pending.difference_update(sequence.pending)
        self.pool.release([block for block in sequence.blocks if block >= 0])
        sequence.blocks, sequence.pending, sequence.digests, sequence.computed = [], [], [], 0

    def clear(self) -> None:
        """Forgets the content of all blocks, and overwrites the free blocks with zeros, because they can have NaN."""
        self.pool.clear()
        for cache in self.caches:
            cache.zero(self.pool.free_blocks)

    def _grow(self, needed: int) -> None:
        """Enlarges the caches, at most to their maximum size, if fewer than `needed` blocks are free."""
        have = len(self.pool)
        if self.pool.free >= needed or have == self.most:
            return
        blocks = min(self.most, max(2 * have, have + needed, 64))
        for cache in self.caches:
            cache.grow(blocks)
        self.pool.grow(blocks)
