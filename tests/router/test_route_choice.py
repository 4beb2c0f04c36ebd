"""The choice of nodes as a pure function: affinity, load, caps, spread."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from engine.ids import Epoch, NodeId
from router.decay import DecayingSum
from router.route_choice import DecodeView, PrefillView, RouteQuestion, plan_route

QUESTION = RouteQuestion(num_tokens=220, num_sequences=1, needed_blocks=20)
EPOCH = Epoch(1)


def prefill(name: str, **fields: float) -> PrefillView:
    return PrefillView(NodeId(name), EPOCH, **fields)  # type: ignore[arg-type]


def decode(name: str, **fields: float) -> DecodeView:
    return DecodeView(NodeId(name), EPOCH, **({"total_blocks": 100, "max_num_seqs": 8} | fields))  # type: ignore[arg-type]


def choose_prefill(views: list[PrefillView], seed: int = 0) -> list[str]:
    plan = plan_route(QUESTION, [decode("d")], views, random.Random(seed))
    assert plan is not None
    return [node.node_id for node in plan.prefill]


def choose_decode(views: list[DecodeView], seed: int = 0, question: RouteQuestion = QUESTION) -> str:
    plan = plan_route(question, views, [], random.Random(seed))
    assert plan is not None
    return plan.decode.node_id


def test_without_decode_nodes_there_is_no_plan() -> None:
    assert plan_route(QUESTION, [], [prefill("a")], random.Random(0)) is None


def test_without_prefill_nodes_the_decode_node_does_it() -> None:
    assert choose_prefill([]) == []


def test_the_holder_of_the_prefix_comes_first() -> None:
    assert choose_prefill([prefill("cold"), prefill("warm", cached_tokens=200)])[0] == "warm"


def test_load_outweighs_a_prefix() -> None:
    busy = prefill("warm", cached_tokens=200, own_tokens=150, foreign_tokens=100)
    assert choose_prefill([prefill("cold"), busy])[0] == "cold"


def test_misses_go_to_the_least_loaded() -> None:
    views = [prefill("a", own_tokens=50), prefill("b", foreign_tokens=20), prefill("c", own_tokens=90)]
    assert choose_prefill(views) == ["b", "a", "c"]


def test_at_most_three_targets_are_named() -> None:
    assert len(choose_prefill([prefill(str(number)) for number in range(6)])) == 3


def test_ties_are_broken_at_random() -> None:
    views = [prefill("a"), prefill("b")]
    firsts = Counter(choose_prefill(views, seed)[0] for seed in range(200))
    assert 60 < firsts["a"] < 140


def test_a_slow_node_counts_its_work_as_more() -> None:
    views = [
        prefill("slow", own_tokens=50, tokens_per_s=100.0),
        prefill("fast", own_tokens=60, tokens_per_s=1000.0),
    ]
    assert choose_prefill(views)[0] == "fast"


def test_a_lead_in_flight_ends_affinity() -> None:
    assert choose_prefill([prefill("cold"), prefill("warm", cached_tokens=216, in_flight=1)])[0] == "warm"
    assert choose_prefill([prefill("cold"), prefill("warm", cached_tokens=216, in_flight=2)])[0] == "cold"


def test_four_clients_with_one_prefix_do_not_make_a_hot_spot() -> None:
    """Requests that never overlap, and four at a time: no node gets over three quarters of them."""
    for concurrency in (1, 4):
        dice = random.Random(concurrency)
        names = ("a", "b")
        holders: set[str] = set()
        recent = {name: DecayingSum(10.0) for name in names}
        under_way: list[str] = []
        served: Counter[str] = Counter()
        for request in range(200):
            now = request * 0.1
            if len(under_way) == concurrency:
                under_way.pop(dice.randrange(concurrency))
            views = [
                prefill(
                    name,
                    cached_tokens=200 if name in holders else 0,
                    in_flight=under_way.count(name),
                    own_tokens=under_way.count(name) * (20 if name in holders else 220),
                    recent_tokens=recent[name].value(now),
                )
                for name in names
            ]
            plan = plan_route(QUESTION, [decode("d")], views, dice)
            assert plan is not None
            winner = plan.prefill[0].node_id
            holders.add(winner)
            recent[winner].add(QUESTION.num_tokens, now)
            under_way.append(winner)
            served[winner] += 1
        assert max(served.values()) <= 150, served


def test_different_prefixes_keep_their_nodes() -> None:
    """Two hot prefixes on two nodes: affinity holds, neither node is overloaded."""
    dice = random.Random(3)
    recent = {name: DecayingSum(10.0) for name in ("a", "b")}
    stayed = 0
    for request in range(200):
        now, home = request * 0.1, "ab"[request % 2]
        views = [
            prefill(name, cached_tokens=200 if name == home else 0, recent_tokens=recent[name].value(now))
            for name in ("a", "b")
        ]
        plan = plan_route(QUESTION, [decode("d")], views, dice)
        assert plan is not None
        winner = plan.prefill[0].node_id
        recent[winner].add(QUESTION.num_tokens, now)
        stayed += winner == home
    assert stayed == 200


def test_decode_goes_where_there_is_room() -> None:
    full = decode("full", used_blocks=90)
    assert choose_decode([full, decode("busy", own_sequences=8, foreign_sequences=4)]) == "busy"


def test_decode_prefers_fewer_sequences_and_more_free_blocks() -> None:
    assert choose_decode([decode("a", own_sequences=3), decode("b", foreign_sequences=1)]) == "b"
    assert choose_decode([decode("a", used_blocks=40), decode("b", used_blocks=10)]) == "b"


def test_a_prefix_on_decode_is_a_bonus_but_no_more() -> None:
    assert choose_decode([decode("cold"), decode("warm", cached_tokens=200)]) == "warm"
    assert choose_decode([decode("cold"), decode("warm", cached_tokens=200, own_sequences=4)]) == "cold"


def test_a_node_that_refused_is_avoided_unless_it_is_the_only_one() -> None:
    refused = decode("refused", is_avoided=True)
    assert choose_decode([refused, decode("other", own_sequences=8)]) == "other"
    assert choose_decode([refused]) == "refused"


def test_many_decode_nodes_share_the_work_of_blind_routers() -> None:
    """Routers with the same old news do not all run to the one idle node."""
    views = [decode(str(number), foreign_sequences=number) for number in range(8)]
    chosen = Counter(choose_decode(views, seed) for seed in range(300))
    assert chosen["0"] < 120
    assert chosen["7"] == 0


def test_the_best_holder_is_always_considered() -> None:
    views = [decode(str(number)) for number in range(9)] + [decode("holder", cached_tokens=200)]
    assert {choose_decode(views, seed) for seed in range(50)} == {"holder"}


def test_the_same_dice_give_the_same_plan() -> None:
    views = [decode(str(number)) for number in range(5)]
    targets = [prefill(str(number)) for number in range(5)]
    plans = {plan_route(QUESTION, views, targets, random.Random(5)) for _ in range(5)}
    assert len(plans) == 1


def test_a_moved_sequence_counts_what_is_shared_as_room() -> None:
    question = replace(QUESTION, needed_blocks=20)
    warm = decode("warm", used_blocks=90, cached_tokens=200)
    assert choose_decode([warm, decode("full", used_blocks=90)], question=question) == "warm"
