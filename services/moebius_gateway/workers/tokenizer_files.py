"""Reads the files of a worker's tokenizer."""

from moebius_gateway.workers.catalog import Files
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub

# In seconds, for all of them.
TIMEOUT = 60.0


async def read_tokenizer(stub: WorkerStub, model: pb.Model) -> Files:
    """Name to content. Raises AioRpcError."""
    request = pb.GetTokenizerRequest(tokenizer_hash=model.tokenizer_hash)
    files: dict[str, bytearray] = {}
    async for chunk in stub.GetTokenizer(request, timeout=TIMEOUT):
        files.setdefault(chunk.name, bytearray()).extend(chunk.data)
    return {name: bytes(data) for name, data in files.items()}
