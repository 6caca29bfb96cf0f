"""What gateways are told of the model: the engine's description, the name, and the tokenizer's files."""

from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files, tokenizer_hash
from moebius_worker.settings import WorkerSettings
from moebius_worker.sim.vocabulary import vocabulary


def read_served_model(
    settings: WorkerSettings, described: worker_pb2.Model
) -> tuple[worker_pb2.Model, dict[str, bytes]]:
    """Reads files; the checkpoint is on disk, since the engine has loaded it. Raises CheckpointError."""
    if settings.model:
        checkpoint = open_checkpoint(settings.model, download=False)
        name, files = checkpoint.name, tokenizer_files(checkpoint)
    else:
        own = vocabulary("")
        name, files = own.name, own.files
    model = worker_pb2.Model()
    model.CopyFrom(described)
    model.id = settings.served_model_name or name
    model.tokenizer_hash = tokenizer_hash(files)
    return model, files
