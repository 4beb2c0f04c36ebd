"""Every flag of every command, defined once, and how flags become the settings of a role. Starts nothing.

A command takes one of the dataclasses below. Each field is a flag (`max_num_seqs` is `--max-num-seqs`), an environment
variable (`PDSERVE_MAX_NUM_SEQS`) and a key of the YAML file given with `--config` (`max-num-seqs`). A flag wins over
the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import typer
import yaml

from decode_node.config import DecodeConfig
from engine.config import EngineConfig, NodeConfig
from engine.errors import ConfigError
from pdserve.addresses import WILDCARDS, advertise_host_for
from prefill_node.config import PrefillConfig
from prefill_node.scheduler import SchedulingPolicy
from router.config import RouterConfig

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

FRONT = "Front door"
CLUSTER = "Cluster"
ENGINE = "Model and engine"
LIMITS = "Limits"
GENERAL = "General"
PANELS = (FRONT, CLUSTER, ENGINE, LIMITS, GENERAL)
"""In the order in which --help shows them."""

OptionsT = TypeVar("OptionsT")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}": 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(value: str | int) -> int:
    """Bytes of '512MiB', '2G', '1.5 GB' or '1048576'. Raises BadParameter."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{str(value)!r} is not a size such as 512MiB, 2G or 1048576")
    return int(float(match[1]) * unit)


def parse_grpc_port(value: str | int) -> str:
    """A port number or `off`, as text. Raises BadParameter."""
    text = str(value).strip().lower()
    if text in ("off", "false"):  # YAML reads a bare `off` as false
        return "off"
    if not text.isdigit() or int(text) > 65535:
        raise typer.BadParameter(f"{str(value)!r} is neither a port number nor 'off'")
    return text


def parse_log_level(value: str) -> str:
    """The name of a logging level, in capitals. Raises BadParameter."""
    level = str(value).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"{value!r} is none of debug, info, warning, error")
    return level


def option(default: Any, help_text: str, panel: str, **settings: Any) -> Any:
    """A dataclass field that is a flag. `settings` are typer.Option's."""
    metadata = {"help": help_text, "panel": panel, "settings": settings}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def environment_names(name: str) -> list[str]:
    """The environment variables of the flag of a field, the first one winning."""
    own = f"PDSERVE_{name.upper()}"
    return [own, "REDIS_URL"] if name == "redis_url" else [own]


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a YAML file the defaults of the command that runs. Raises BadParameter naming a wrong key."""
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise typer.BadParameter(f"{path} cannot be read as YAML: {reason}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold one 'key: value' per line")
    known = {str(parameter.name): parameter for parameter in context.command.params}
    values: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known or name in ("config", "help"):
            raise typer.BadParameter(f"{path} has the unknown key {str(key)!r}")
        takes_many = known[name].multiple if hasattr(known[name], "multiple") else False
        if isinstance(value, dict) or (isinstance(value, list) and not takes_many):
            raise typer.BadParameter(f"{path} must hold a single value for the key {str(key)!r}")
        if value is not None:
            values[name] = [value] if takes_many and not isinstance(value, list) else value
    context.default_map = values
    return path


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every role takes."""

    model: str = option(DEFAULT_MODEL, "Hugging Face id, local folder or GGUF file.", ENGINE, argument=True)
    config: Path | None = option(
        None, "YAML file with any of these options.", GENERAL, callback=read_config_file, is_eager=True, metavar="FILE"
    )
    log_level: str = option(
        "info", "debug, info, warning or error.", GENERAL, parser=parse_log_level, metavar="LEVEL", show_default="info"
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output, in tokens.", LIMITS, metavar="TOKENS", show_default="the model's own"
    )
    progress_deadline: float = option(
        5.0, "Silence after which a node is taken out of rotation and its requests move.", CLUSTER, metavar="SECONDS"
    )
    drain_timeout: float = option(30.0, "Time to finish requests after SIGTERM.", CLUSTER, metavar="SECONDS")
    seed: int | None = option(
        None, "Makes the seeds of requests without one repeatable.", ENGINE, show_default="from the system"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CommonOptions):
    """What computes, and how much at once."""

    dtype: str = option("auto", "Type of weights and KV: auto, float32, bfloat16 or float16.", ENGINE)
    device: str = option("cpu", "Where to compute, as torch names it.", ENGINE)
    block_size: int = option(16, "Tokens of one KV block.", ENGINE, metavar="TOKENS")
    num_blocks: int | None = option(
        None, "Blocks of a node's pool, instead of --kv-memory.", ENGINE, show_default="from --kv-memory"
    )
    kv_memory: int = option(
        512 * 1024**2,
        "Memory of a node's pool, such as 512MiB or 2G.",
        ENGINE,
        parser=parse_size,
        metavar="SIZE",
        show_default="512MiB",
    )
    max_num_batched_tokens: int = option(512, "Tokens that one step may compute.", LIMITS)
    max_num_seqs: int = option(32, "Sequences that one step may hold.", LIMITS)
    scheduling_policy: str = option(
        "priority",
        "'priority' takes requests of a lower `priority` first, and short prompts before long ones, starving nobody; "
        "'fcfs' takes them in order of arrival.",
        LIMITS,
        metavar="POLICY",
    )

    def engine_config(self, *, num_threads: int | None) -> EngineConfig:
        """Raises BadParameter naming the flag that is wrong."""
        with _naming_flags():
            return EngineConfig(
                model=self.model,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                kv_memory_bytes=self.kv_memory,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                num_threads=num_threads,
                seed=self.seed or 0,
            )


@dataclass(frozen=True, kw_only=True)
class DecodeLimitOptions:
    """What bounds a decode node alone."""

    swap_space: float = option(
        1.0, "Host memory for the KV of preempted sequences; with 0 it is computed again.", LIMITS, metavar="GIB"
    )
    itl_bound_ms: float = option(
        250.0,
        "How long prompts that a decode node computes may make a step, when streams wait for it.",
        LIMITS,
        metavar="MS",
    )


@dataclass(frozen=True, kw_only=True)
class DirectoryOptions:
    """Where a role that stands alone finds the others."""

    redis_url: str = option("redis://127.0.0.1:6379/0", "Where the directory lives.", CLUSTER, metavar="URL")
    cluster: str = option("default", "Name of the cluster, so that several may share one Redis.", CLUSTER)
    cluster_token: str | None = option(
        None,
        "Secret that the processes of the cluster show each other; nodes need it to listen beyond loopback.",
        CLUSTER,
        metavar="SECRET",
        show_default="none",
    )


@dataclass(frozen=True, kw_only=True)
class FrontOptions(CommonOptions):
    """What clients meet."""

    host: str = option("127.0.0.1", "Address of the HTTP and gRPC servers.", FRONT)
    port: int = option(8000, "Port of the HTTP server; 0 takes a free one.", FRONT)
    grpc_port: str | None = option(
        None,
        "Port of the gRPC server; 0 takes a free one, 'off' serves none.",
        FRONT,
        parser=parse_grpc_port,
        metavar="PORT",
        show_default="the port after --port",
    )
    served_model_name: list[str] = option(
        [], "Name that clients use; may be given several times.", FRONT, metavar="NAME", show_default="MODEL"
    )
    api_key: list[str] = option(
        [], "Key that clients must send; may be given several times.", FRONT, metavar="KEY", show_default="none asked"
    )
    local_prefill_threshold: int = option(
        0, "Uncached prompt tokens up to which a decode node prefills by itself.", CLUSTER, metavar="TOKENS"
    )
    max_waiting_requests: int = option(
        96, "Requests that may wait beyond what the decode nodes run at once, before 429.", LIMITS
    )

    max_waiting_tokens: int | None = option(
        None,
        "Tokens of prompts that may wait to be computed, before 429.",
        LIMITS,
        metavar="TOKENS",
        show_default="4 times what the decode nodes' KV blocks hold",
    )
    max_priority_boost: int = option(
        0,
        "How far below 0 the `priority` of a request may be, each step being worth a minute of waiting; with 0 clients "
        "can only stand back.",
        LIMITS,
        metavar="STEPS",
    )

    def grpc_port_number(self, http_port: int) -> int | None:
        """The port to serve gRPC on, None for none."""
        if self.grpc_port == "off":
            return None
        if self.grpc_port is not None:
            return int(self.grpc_port)
        return http_port + 1 if 0 < http_port < 65535 else 0

    def router_config(self, *, redis_url: str, cluster: str, cluster_token: str | None = None) -> RouterConfig:
        """Raises BadParameter naming the flag that is wrong."""
        if any(key.split() != [key] for key in self.api_key):
            raise typer.BadParameter("--api-key must not be empty or hold white space")
        with _naming_flags():
            return RouterConfig(
                model=self.model,
                host=self.host,
                port=self.port,
                grpc_port=self.grpc_port_number(self.port),
                redis_url=redis_url,
                cluster=cluster,
                cluster_token=cluster_token,
                served_model_names=tuple(self.served_model_name),
                api_keys=tuple(self.api_key),
                max_model_len=self.max_model_len,
                max_waiting_requests=self.max_waiting_requests,
                max_waiting_tokens=self.max_waiting_tokens,
                max_priority_boost=self.max_priority_boost,
                progress_deadline_s=self.progress_deadline,
                local_prefill_threshold=self.local_prefill_threshold,
                drain_timeout_s=self.drain_timeout,
                seed=self.seed,
            )


@dataclass(frozen=True, kw_only=True)
class RouterOptions(FrontOptions, DirectoryOptions):
    """Flags of `pdserve router`."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions(EngineOptions, DirectoryOptions):
    """Flags that `pdserve prefill` and `pdserve decode` share."""

    host: str = option("127.0.0.1", "Address to listen on for other nodes.", CLUSTER)
    port: int = option(0, "Port to listen on; 0 takes a free one.", CLUSTER)
    advertise_host: str | None = option(
        None, "Host name or address by which others reach this node.", CLUSTER, show_default="found out"
    )
    node_id: str | None = option(
        None, "Name of this node across restarts.", CLUSTER, show_default="from role and address"
    )
    heartbeat: float = option(1.0, "Time between two renewals of the node record.", CLUSTER, metavar="SECONDS")
    threads: int | None = option(None, "Threads that compute.", ENGINE, show_default="torch's choice")

    def node_config(self) -> NodeConfig:
        """Raises BadParameter naming the flag that is wrong."""
        advertise_host = self.advertise_host
        if advertise_host is None and self.host in WILDCARDS:
            advertise_host = advertise_host_for(self.redis_url)
        engine = self.engine_config(num_threads=self.threads)
        with _naming_flags():
            return NodeConfig(
                engine=engine,
                host=self.host,
                port=self.port,
                advertise_host=advertise_host,
                node_id=self.node_id,
                redis_url=self.redis_url,
                cluster=self.cluster,
                cluster_token=self.cluster_token,
                heartbeat_s=self.heartbeat,
                progress_deadline_s=self.progress_deadline,
                drain_timeout_s=self.drain_timeout,
            )


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(NodeOptions):
    """Flags of `pdserve prefill`."""

    lease: float = option(
        30.0, "How long computed blocks wait for a decode node to commit.", CLUSTER, metavar="SECONDS"
    )

    def prefill_config(self) -> PrefillConfig:
        """Raises BadParameter naming the flag that is wrong."""
        node = self.node_config()
        with _naming_flags():
            # Checked there.
            policy = cast(SchedulingPolicy, self.scheduling_policy)
            return PrefillConfig(node=node, lease_s=self.lease, scheduling_policy=policy)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(NodeOptions, DecodeLimitOptions):
    """Flags of `pdserve decode`."""

    shared_memory: bool = option(True, "Let prefill nodes of this host write straight into the pool.", CLUSTER)

    def decode_config(self) -> DecodeConfig:
        """Raises BadParameter naming the flag that is wrong."""
        node = self.node_config()
        with _naming_flags():
            return DecodeConfig(
                node=node,
                shared_memory=self.shared_memory,
                scheduling_policy=self.scheduling_policy,
                itl_bound_ms=self.itl_bound_ms,
                swap_space_gib=self.swap_space,
            )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontOptions, EngineOptions, DecodeLimitOptions):
    """Flags of `pdserve serve`."""

    prefill_nodes: int = option(1, "Prefill nodes; with 0 the decode nodes prefill too.", CLUSTER, min=0, max=64)
    decode_nodes: int = option(1, "Decode nodes.", CLUSTER, min=1, max=64)
    threads_per_node: int | None = option(
        None, "Threads that a node computes with.", ENGINE, min=1, show_default="cores / nodes"
    )
    redis_url: str | None = option(
        None, "Redis to use.", CLUSTER, metavar="URL", show_default="a private one, started and stopped with this"
    )


_FLAG_OF_FIELD = {
    "kv_memory_bytes": "--kv-memory",
    "num_threads": "--threads",
    "heartbeat_s": "--heartbeat",
    "progress_deadline_s": "--progress-deadline",
    "drain_timeout_s": "--drain-timeout",
    "lease_s": "--lease",
    "swap_space_gib": "--swap-space",
    "served_model_names": "--served-model-name",
    "api_keys": "--api-key",
}


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Turn the ValueError of a settings class, which names a field first, into one that names the flag."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        flag = _FLAG_OF_FIELD.get(name, "--" + name.replace("_", "-"))
        raise typer.BadParameter(f"{flag} {rest}") from error


def takes(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], int]], Callable[..., int]]:
    """Give a command every flag of a dataclass; the command gets the filled-in dataclass and returns an exit code."""

    def decorate(function: Callable[[OptionsT], int]) -> Callable[..., int]:
        def command(**values: object) -> int:
            return function(options(**values))

        hints = typing.get_type_hints(options)
        parameters = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=_typer_option(one), annotation=hint)
            for one in sorted(fields(options), key=lambda one: PANELS.index(one.metadata["panel"]))  # type: ignore[arg-type]
            for hint in (hints[one.name],)
        ]
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = hints | {"return": int}
        command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        return command

    return decorate


def _typer_option(one: Field[Any]) -> Any:
    settings, names = dict(one.metadata["settings"]), environment_names(one.name)
    factory: Any = one.default_factory
    default = factory() if one.default is MISSING else one.default
    settings |= {
        "help": one.metadata["help"],
        "rich_help_panel": one.metadata["panel"],
        "envvar": names[0] if len(names) == 1 else names,
        "show_envvar": False,
    }
    if one.type in ("int", "int | None", "float"):
        settings.setdefault("metavar", "N")
    if settings.pop("argument", False):
        return typer.Argument(default, metavar="MODEL", **settings)
    flag = "--" + one.name.replace("_", "-")
    if isinstance(default, bool):
        flag = f"{flag}/--no-{flag[2:]}"
    settings.setdefault("show_default", default is not None)
    return typer.Option(default, flag, **settings)


def refuse_foreign_kernels() -> None:
    """Raise ConfigError when the environment holds the other `kernels`, which would be imported in place of ours."""
    from importlib import metadata

    try:
        metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ConfigError(
        "The package 'kernels' from Hugging Face is installed here and clashes with pdserve's folder of that name; "
        "uninstall it or give pdserve an environment of its own."
    )
