"""Whether a router or a node can serve now, asked from outside. Loads neither torch nor a model."""

from __future__ import annotations


def check_http(url: str, timeout_s: float) -> str | None:
    """Ask a router's /ready; None when it is, else why not, in one sentence."""
    import httpx

    try:
        response = httpx.get(url.rstrip("/") + "/ready", timeout=timeout_s, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{url} does not answer: {error}"
    return None if response.status_code == httpx.codes.OK else f"{url} answers {response.status_code}"


def check_grpc(address: str, timeout_s: float) -> str | None:
    """Ask a node by the standard gRPC health protocol; None when it serves, else why not, in one sentence."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.code().name}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"
