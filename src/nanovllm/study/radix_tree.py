"""A radix tree over token histories, as a prefix index: the comparison to the engine's hash chain.

Edges hold several units (blocks, or tokens) and are split where histories part, as in SGLang's
RadixAttention (Zheng et al., 2024). A unit knows the blocks that hold it, and a block its node, so
that publishing and evicting need no walk from the root. Tokens themselves are the keys, so that
nothing can collide.
"""

from __future__ import annotations

from nanovllm.engine.block_manager import Block, BlockManager, encode_tokens
from nanovllm.engine.sequence import Sequence

Holders = dict[int, None]
"""Blocks of one content, first come first."""


class Node:
    """`edge` is the text of `len(units)` units; `children` are keyed by their first unit."""

    __slots__ = ("children", "edge", "parent", "units")

    def __init__(self, parent: Node | None, edge: bytes, units: list[Holders]) -> None:
        self.parent = parent
        self.edge = bytearray(edge)
        self.units = units
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """Contents, and which blocks hold them.

    Args:
        unit: bytes of one unit.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.root = Node(None, b"", [])
        self.num_nodes = 0
        self._node_of: dict[int, Node] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._node_of

    def match(self, key: bytes) -> list[Holders]:
        """Who holds the leading units of `key`, up to the first that nobody holds."""
        node, at, found = self.root, 0, list[Holders]()
        while child := node.children.get(key[at : at + self.unit]):
            end = at + len(child.edge)
            if child.edge != key[at:end]:
                return found + child.units[: self._num_common(child, key, at)]
            found += child.units
            node, at = child, end
        return found

    def _num_common(self, node: Node, key: bytes, at: int) -> int:
        for i in range(len(node.units)):
            offset, end = i * self.unit, (i + 1) * self.unit
            if node.edge[offset:end] != key[at + offset : at + end]:
                return i
        return len(node.units)

    def insert(self, text: bytes, block_id: int, parent_id: int | None) -> None:
        """`block_id` holds this unit behind the history that ends with `parent_id`'s."""
        parent = self.root if parent_id is None else self._node_of[parent_id]
        depth = 0 if parent_id is None else self._depth(parent, parent_id)
        offset = depth * self.unit
        if depth < len(parent.units) and parent.edge[offset : offset + self.unit] == text:
            parent.units[depth][block_id] = None
            self._node_of[block_id] = parent
            return
        if depth < len(parent.units):
            self._split(parent, depth)
        if child := parent.children.get(text):
            child.units[0][block_id] = None
            self._node_of[block_id] = child
        elif parent.children or parent is self.root:
            self._add_child(parent, text, [{block_id: None}])
        else:
            parent.edge += text
            parent.units.append({block_id: None})
            self._node_of[block_id] = parent

    def remove(self, block_id: int) -> None:
        """It holds nothing any more. What only it held goes, with all that continues it."""
        node = self._node_of.pop(block_id, None)
        if node is None:
            return
        depth = self._depth(node, block_id) - 1
        del node.units[depth][block_id]
        if not node.units[depth]:
            self._cut(node, depth)

    @staticmethod
    def _depth(node: Node, block_id: int) -> int:
        """Units of the node up to and with the block's; the deepest are asked for most."""
        return next(i for i in range(len(node.units), 0, -1) if block_id in node.units[i - 1])

    def _add_child(self, parent: Node, edge: bytes, units: list[Holders]) -> Node:
        child = Node(parent, edge, units)
        parent.children[edge[: self.unit]] = child
        self._node_of.update((block_id, child) for holders in units for block_id in holders)
        self.num_nodes += 1
        return child

    def _split(self, node: Node, depth: int) -> None:
        """Leave the node its first `depth` units; a child takes the others."""
        at, children = depth * self.unit, node.children
        edge, units = bytes(node.edge[at:]), node.units[depth:]
        del node.edge[at:], node.units[depth:]
        node.children = {}
        lower = self._add_child(node, edge, units)
        lower.children = children
        for child in children.values():
            child.parent = lower

    def _cut(self, node: Node, depth: int) -> None:
        for holders in node.units[depth:]:
            for block_id in holders:
                del self._node_of[block_id]
        for child in tuple(node.children.values()):
            self._cut(child, 0)
        if depth == 0:
            assert node.parent is not None
            del node.parent.children[bytes(node.edge[: self.unit])]
            self.num_nodes -= 1
        del node.edge[depth * self.unit :], node.units[depth:]


class RadixBlockManager(BlockManager):
    """The reference's blocks, found through a tree; requests with a salt share nothing here."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tree = RadixTree(len(encode_tokens([0])) * block_size)

    def lookup(self, seq: Sequence) -> list[int]:
        if not seq.cacheable or seq.salt is not None:
            return []
        end = (seq.num_tokens - 1) // self.block_size * self.block_size
        found = self.tree.match(encode_tokens(seq.token_ids[:end]))
        return [self._best(holders) for holders in found]

    def _best(self, holders: Holders) -> int:
        """One in use if there is: it costs no free block."""
        used = (block_id for block_id in holders if self.blocks[block_id].ref_count)
        return next(used, next(iter(holders)))

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        if not seq.cacheable or seq.salt is not None:
            return
        for i in range(start // self.block_size, end // self.block_size):
            block_id = seq.block_table[i]
            parent = seq.block_table[i - 1] if i else None
            if block_id not in self.tree and (parent is None or parent in self.tree):
                self.tree.insert(encode_tokens(seq.block(i)), block_id, parent)

    def _release(self, block: Block) -> None:
        super()._release(block)
        if block.ref_count == 0 and block.block_id in self.tree:
            self.free_block_ids.move_to_end(block.block_id)

    def _unpublish(self, block: Block) -> None:
        self.tree.remove(block.block_id)
