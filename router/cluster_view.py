"""One node as `/debug/cluster` shows it."""

from __future__ import annotations

from proto import worker_pb2 as pb
from router.node import Node


def describe_node(node: Node, fresh: pb.NodeStatus | None, now: float) -> dict[str, object]:
    """From a fresh status, or else from the last one it sent, marked stale."""
    status = fresh or node.status or pb.NodeStatus()
    blocks, transfers = status.blocks, status.transfers
    view: dict[str, object] = {
        "id": node.node_id,
        "role": node.role,
        "pid": node.description.pid if node.description is not None else None,
        "epoch": int(node.epoch),
        "address": node.address,
        "state": node.health(now).value,
        "stale": fresh is None,
        "blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "in_use": blocks.in_use,
            "quarantined": blocks.quarantined,
        },
        "leases": status.leases,
        "transfers": {
            "started": transfers.started,
            "committed": transfers.committed,
            "failed": transfers.failed,
            "aborted": transfers.aborted,
        },
        "in_flight": status.in_flight,
        "last_step_age_s": status.last_step_age_s,
        "running_sequences": status.running_sequences,
        "waiting_sequences": status.waiting_sequences,
        "waiting_tokens": status.waiting_tokens,
        "steps": status.steps,
        "prefill_tokens_computed": status.prefill_tokens_computed,
        "prefill_tokens_cached": status.prefill_tokens_cached,
        "tokens_generated": status.tokens_generated,
        "preemptions": status.preemptions,
        "local_prefills": status.local_prefills,
        "messages_ignored": status.messages_ignored,
        "kv_bytes": status.kv_bytes,
        "transports": {
            name: {"transfers": use.transfers, "bytes": use.bytes, "seconds": use.seconds}
            for name, use in status.transports.items()
        },
        "prefill_tokens_per_s": status.prefill_tokens_per_s,
        "failures": dict(status.failures),
        "version": node.description.version if node.description is not None else None,
        "router_in_flight": {
            "attempts": node.own.attempts,
            "sequences": node.own.sequences,
            "blocks": node.own.blocks,
            "prefills": node.own.prefills,
            "prefill_tokens": node.own.prefill_tokens,
        },
    }
    why_not = node.mismatch or node.stalled or node.last_trouble
    if why_not:
        view["trouble"] = why_not
    return view
