"""Where a setting comes from, how it is read, and what is said when it is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from engine import model_store
from engine.model_store import ModelFiles
from pdserve import options as options_module
from pdserve.launcher import make_plan
from pdserve.options import (
    DEFAULT_MODEL,
    DecodeOptions,
    PrefillOptions,
    RouterOptions,
    ServeOptions,
    environment_names,
    parse_size,
    takes,
)

Parse = Callable[..., ServeOptions]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    for name in ("REDIS_URL", "PDSERVE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)

    def parse_as(*arguments: str, options: type[ServeOptions] = ServeOptions) -> ServeOptions:
        seen: list[ServeOptions] = []
        app = typer.Typer()

        @app.command()
        @takes(options)
        def command(values: ServeOptions) -> int:
            seen.append(values)
            return 0

        app(list(arguments), standalone_mode=False)
        return seen[0]

    return parse_as


def test_flag_wins_over_environment_over_file_over_default(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("port: 3\nblock-size: 3\nmax_num_seqs: 3\nmodel: from-file\n")
    monkeypatch.setenv("PDSERVE_PORT", "2")
    monkeypatch.setenv("PDSERVE_BLOCK_SIZE", "2")
    values = parse("--config", str(file), "--port", "1")
    assert (values.port, values.block_size, values.max_num_seqs) == (1, 2, 3)
    assert values.max_num_batched_tokens == 512
    assert values.model == "from-file"
    assert parse("from-argument", "--config", str(file)).model == "from-argument"


def test_config_file_may_come_from_the_environment(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("kv-memory: 1GiB\napi-key: [one, two]\nserved-model-name: tiny\ngrpc-port: off\n")
    monkeypatch.setenv("PDSERVE_CONFIG", str(file))
    values = parse()
    assert values.kv_memory == 1024**3
    assert values.api_key == ["one", "two"]
    assert values.served_model_name == ["tiny"]
    assert values.grpc_port_number(8000) is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prt: 1", "unknown key 'prt'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: [1, 2]", "single value for the key 'port'"),
        ("- port", "one 'key: value' per line"),
        ("port: {", "cannot be read as YAML"),
    ],
)
def test_wrong_config_file_is_named(parse: Parse, tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text(content)
    with pytest.raises(typer.BadParameter, match=sentence):
        parse("--config", str(file))


def test_api_keys_of_the_environment_are_separated_by_spaces(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "one two")
    assert parse().api_key == ["one", "two"]
    monkeypatch.setenv("PDSERVE_API_KEY", "")  # as compose passes a variable that is not set
    assert parse().api_key == []


def test_redis_url_is_also_read_from_its_usual_variable(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().redis_url is None
    monkeypatch.setenv("REDIS_URL", "redis://usual")
    assert parse().redis_url == "redis://usual"
    monkeypatch.setenv("PDSERVE_REDIS_URL", "redis://own")
    assert parse().redis_url == "redis://own"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 1024**2),
        ("512M", 512 * 1024**2),
        ("2g", 2 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("1048576", 1048576),
        (4096, 4096),
        ("10b", 10),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "5XB", "1 2", "0x10", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ((), 8001),
        (("--port", "9000"), 9001),
        (("--port", "0"), 0),
        (("--grpc-port", "0"), 0),
        (("--grpc-port", "7"), 7),
    ],
)
def test_grpc_port_follows_the_http_port(parse: Parse, arguments: tuple[str, ...], port: int) -> None:
    values = parse(*arguments)
    assert values.grpc_port_number(values.port) == port


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kv-memory", "0"), "--kv-memory must be greater than 0"),
        (("--dtype", "int8"), "--dtype must be one of"),
        (("--num-blocks", "1"), "--num-blocks must be at least 2"),
        (("--block-size", "-4"), "--block-size must be greater than 0, not -4"),
    ],
)
def test_wrong_engine_setting_names_its_flag(parse: Parse, arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(typer.BadParameter, match=sentence):
        parse(*arguments).engine_config(num_threads=None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--port", "70000"), "--port must be between 0 and 65535"),
        (("--drain-timeout", "0"), "--drain-timeout must be greater than 0"),
        (("--progress-deadline", "nan"), "--progress-deadline must be greater than 0"),
        (("--api-key", "two words"), "--api-key must not"),
        (("--max-priority-boost", "-1"), "--max-priority-boost must be at least 0"),
        (("--max-waiting-tokens", "0"), "--max-waiting-tokens must be greater than 0"),
    ],
)
def test_wrong_router_setting_names_its_flag(parse: Parse, arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(typer.BadParameter, match=sentence):
        parse(*arguments).router_config(redis_url="redis://here", cluster="one")


def test_api_keys_are_not_shown_by_the_settings() -> None:
    config = ServeOptions(api_key=["canary-key"]).router_config(redis_url="redis://here", cluster="one")
    assert config.api_keys == ("canary-key",)
    assert "canary-key" not in repr(config)


def test_wildcard_host_advertises_the_address_that_reaches_redis() -> None:
    node = DecodeOptions(
        host="0.0.0.0", redis_url="redis://:secret@127.0.0.1:6379/0", cluster_token="token"
    ).node_config()
    assert node.advertise_host == "127.0.0.1"
    assert (
        DecodeOptions(cluster_token="token", host="0.0.0.0", advertise_host="here").node_config().advertise_host
        == "here"
    )
    assert DecodeOptions(host="127.0.0.7").node_config().advertise_host is None


def test_settings_reach_the_roles() -> None:
    prefill = PrefillOptions(lease=7.0, kv_memory=1 << 20, threads=3, node_id="p", cluster="c").prefill_config()
    assert prefill.lease_s == 7.0
    assert prefill.node.engine.kv_memory_bytes == 1 << 20
    assert prefill.node.engine.num_threads == 3
    assert (prefill.node.node_id, prefill.node.cluster) == ("p", "c")
    assert DecodeOptions(shared_memory=False).decode_config().shared_memory is False
    decode = DecodeOptions(swap_space=2.5, itl_bound_ms=70.0, scheduling_policy="fcfs").decode_config()
    assert (decode.swap_bytes, decode.itl_bound_s, decode.scheduling_policy) == (2560 * 1024**2, 0.07, "fcfs")
    assert PrefillOptions(scheduling_policy="fcfs").prefill_config().scheduling_policy == "fcfs"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (DecodeOptions(swap_space=-1.0), "--swap-space must be at least 0"),
        (DecodeOptions(swap_space=float("inf")), "--swap-space must be at least 0"),
        (DecodeOptions(itl_bound_ms=0.0), "--itl-bound-ms must be greater than 0"),
        (DecodeOptions(scheduling_policy="lifo"), "--scheduling-policy must be one of fcfs, priority"),
    ],
)
def test_wrong_setting_of_a_decode_node_names_its_flag(options: DecodeOptions, sentence: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(sentence)):
        options.decode_config()


def test_settings_of_a_box_reach_its_nodes(tmp_path: Path) -> None:
    options = ServeOptions(
        redis_url="redis://there", swap_space=2.5, itl_bound_ms=70.0, scheduling_policy="fcfs", max_priority_boost=3
    )
    config = options.router_config(redis_url="redis://there", cluster="c")
    plan = make_plan(options, config, ModelFiles("tiny", tmp_path), None)
    (_, prefill), (_, decode) = plan.prefill[0], plan.decode[0]
    for flag, value, reaches_prefill in (
        ("--swap-space", "2.5", False),
        ("--itl-bound-ms", "70.0", False),
        ("--scheduling-policy", "fcfs", True),
    ):
        assert decode[decode.index(flag) + 1] == value
        assert (flag in prefill) is reaches_prefill
        assert flag not in plan.router[1]
    router = plan.router[1]
    assert router[router.index("--max-priority-boost") + 1] == "3" and config.max_priority_boost == 3


def test_every_flag_has_help_and_its_own_variable() -> None:
    for one in (ServeOptions, RouterOptions, PrefillOptions, DecodeOptions):
        variables = [environment_names(each.name)[0] for each in fields(one)]
        assert len(set(variables)) == len(variables)
        assert all(each.metadata["help"].endswith(".") for each in fields(one))
        assert all(each.metadata["panel"] in options_module.PANELS for each in fields(one))


def test_default_model_is_the_one_that_the_store_knows() -> None:
    assert DEFAULT_MODEL == model_store.DEFAULT_MODEL
