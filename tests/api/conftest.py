"""One small cluster for all tests of the API, since starting it takes longer than they do; each leaves it idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.api.client import Api
from tests.e2e.cluster_processes import ClusterProcesses, slow_steps
from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]

KEY = "key-of-one-tenant"
OTHER_KEY = "key-of-another-tenant"
NUM_BLOCKS = 64
BLOCK_SIZE = 16
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE
SEQUENCES_AT_ONCE = 4
MAX_WAITING = 12


@pytest.fixture(scope="session")
def shared_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """One prefill and one decode node. What the second router sends to decode is prefilled there as well."""
    cluster = ClusterProcesses(
        tmp_path_factory.mktemp("cluster"),
        tiny_model,
        routers=2,
        node_flags=["--num-blocks", str(NUM_BLOCKS)],
        decode_flags=["--max-num-seqs", str(SEQUENCES_AT_ONCE)],
        router_flags=["--api-key", KEY, "--api-key", OTHER_KEY, "--max-waiting-requests", str(MAX_WAITING)],
        api_key=KEY,
        faults={"decode-0": slow_steps(0.003)},
    )
    cluster["router-1"].command += ["--local-prefill-threshold", str(POOL_TOKENS)]
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def cluster(shared_cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The cluster, with all nodes in rotation, and nothing held after the test."""
    for router in (0, 1):
        shared_cluster.wait_for_nodes(2, router)
    yield shared_cluster
    shared_cluster.assert_idle()
    assert shared_cluster.violated_invariants(router=1) == []


@pytest.fixture(scope="session")
def make_api(shared_cluster: ClusterProcesses) -> Iterator[Callable[[int, str], Api]]:
    made: list[Api] = []

    def make(router: int, key: str) -> Api:
        made.append(Api(shared_cluster.url(router), key))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture(scope="session")
def api(make_api: Callable[[int, str], Api]) -> Api:
    """Prompts are computed on the prefill node and handed to the decode node."""
    return make_api(0, KEY)


@pytest.fixture(scope="session")
def local_api(make_api: Callable[[int, str], Api]) -> Api:
    """The same cluster through a router that has prompts computed where they are decoded."""
    return make_api(1, KEY)


@pytest.fixture(scope="session")
def other_tenant(make_api: Callable[[int, str], Api]) -> Api:
    """As `api`, with another key."""
    return make_api(0, OTHER_KEY)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="session")
def end_ids(tokenizer: Tokenizer) -> list[int]:
    """Both tokens that end a sequence."""
    return [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")]


@pytest.fixture(scope="session")
def words_only(tokenizer: Tokenizer) -> dict[str, int]:
    """A logit bias under which every token is two characters of ASCII or more, so that text can be cut within them."""
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())}
    return {str(token_id): -100 for token_id, text in texts.items() if not (text.isascii() and len(text) > 1)}
