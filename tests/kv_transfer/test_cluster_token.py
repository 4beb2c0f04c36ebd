"""Internal ports answer nobody without the cluster's token, for every shape of call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.config import EngineConfig, NodeConfig
from kv_transfer.channels import Channels, open_channel
from kv_transfer.cluster_token import TokenCheck
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

TOKEN = "canary-of-the-cluster"


class Answering(worker_pb2_grpc.NodeServiceServicer, worker_pb2_grpc.DecodeServiceServicer):
    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.NodeDescription:
        return pb.NodeDescription(address="here")

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.NodeStatus]:
        yield pb.NodeStatus(steps=1)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionUpdate]:
        async for command in request_iterator:
            yield pb.SessionUpdate(identity=pb.NodeIdentity(node_id=command.hello.router_id))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[TokenCheck(TOKEN)])
    worker_pb2_grpc.add_NodeServiceServicer_to_server(Answering(), server)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(Answering(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_every_shape_of_call_passes_with_the_token(address: str) -> None:
    channels = Channels(TOKEN)
    channel = channels.get(address)
    node = worker_pb2_grpc.NodeServiceStub(channel)
    assert (await node.Describe(pb.DescribeRequest(), timeout=5)).address == "here"
    assert [status.steps async for status in node.Watch(pb.WatchRequest(), timeout=5)] == [1]
    session = worker_pb2_grpc.DecodeServiceStub(channel).Session()
    await session.write(pb.SessionCommand(hello=pb.SessionHello(router_id="me")))
    assert (await session.read()).identity.node_id == "me"
    session.cancel()
    await channels.close()


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x"])
async def test_every_shape_of_call_is_refused_without_it(address: str, token: str | None) -> None:
    channel = open_channel(address, token)
    node = worker_pb2_grpc.NodeServiceStub(channel)
    session = worker_pb2_grpc.DecodeServiceStub(channel).Session()
    for call in (
        node.Describe(pb.DescribeRequest(), timeout=5),
        node.Watch(pb.WatchRequest(), timeout=5).read(),
        session.read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert TOKEN not in str(refused.value)
    await channel.close()


async def test_health_needs_no_token(address: str) -> None:
    channel = open_channel(address)
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await channel.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "somewhere"])
def test_a_node_listens_beyond_loopback_only_with_a_token(host: str) -> None:
    engine = EngineConfig(model="any")
    with pytest.raises(ValueError, match="cluster_token must be set"):
        NodeConfig(engine=engine, host=host)
    config = NodeConfig(engine=engine, host=host, cluster_token=TOKEN)
    assert TOKEN not in repr(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.12", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert NodeConfig(engine=EngineConfig(model="any"), host=host).cluster_token is None


@pytest.mark.parametrize("token", ["", " ", "two words", "line\nbreak", "naïve"])
def test_a_token_that_cannot_travel_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="cluster_token"):
        NodeConfig(engine=EngineConfig(model="any"), cluster_token=token)
