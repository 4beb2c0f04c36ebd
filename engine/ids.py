"""The ids that look alike and must not be swapped. Knows no behaviour."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""A block's place in one node's pool, in [0, num_blocks)."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes naming the content of a full block and everything before it."""

AttemptId = NewType("AttemptId", str)
"""One try at serving a request on one decode node; 32 hex digits, never reused."""

RequestId = NewType("RequestId", str)
"""A label for logs; a client may have chosen it, so nothing is keyed by it."""

NodeId = NewType("NodeId", str)
"""A node's name across restarts."""

Epoch = NewType("Epoch", int)
"""A node's incarnation: nanoseconds since 1970 at its start, so a later one is larger."""
