"""How to call pdserve over gRPC from Python: list the models, stream a completion or a chat, stop early.

    python examples/grpc_client.py --target 127.0.0.1:8001 "The capital of France is"
    python examples/grpc_client.py --target 127.0.0.1:8001 --chat "What is the capital of France?"

It needs grpcio and the generated code of proto/inference.proto, which comes with pdserve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import grpc

from proto import inference_pb2 as pb
from proto import inference_pb2_grpc as rpc


def stream_text(
    stub: rpc.InferenceStub, request: pb.GenerateRequest, *, api_key: str | None = None, timeout_s: float | None = 60.0
) -> Iterator[pb.GenerateResponse]:
    """The responses as they come. Closing the iterator cancels the call, which stops the generation."""
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
    # The timeout travels with the call: the server gives up when the caller does.
    call = stub.Generate(request, metadata=metadata, timeout=timeout_s)
    try:
        yield from call
    finally:
        call.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text as it arrives; 0 when the answer is complete."""
    parser = argparse.ArgumentParser(description="Stream text from pdserve over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--target", default="127.0.0.1:8001", help="host:port of the router's gRPC server")
    parser.add_argument("--api-key", help="a key, when the router asks for one")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    options = parser.parse_args(arguments)

    request = pb.GenerateRequest(max_tokens=options.max_tokens, temperature=options.temperature, stop=options.stop)
    if options.chat:
        request.chat.messages.add(role="user", content=options.prompt)
    else:
        request.text = options.prompt

    with grpc.insecure_channel(options.target) as channel:
        stub = rpc.InferenceStub(channel)
        try:
            for response in stream_text(stub, request, api_key=options.api_key):
                print(response.text, end="", flush=True)
                if response.finish_reason:
                    reason = response.finish_reason
                if response.HasField("usage"):
                    usage = response.usage
        except grpc.RpcError as error:
            # UNAVAILABLE and RESOURCE_EXHAUSTED may be tried again, after the seconds in `retry-after` if it is there.
            metadata = dict(error.trailing_metadata() or ())
            retry_after = metadata.get("retry-after")
            hint = f" (try again after {retry_after} s)" if retry_after else ""
            print(f"\n{error.code().name}: {error.details()}{hint}", file=sys.stderr)
            return 1
    print(f"\n[{reason}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
