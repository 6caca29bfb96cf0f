"""The model families whose GGUF files can be read, a table each."""

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moebius_worker.checkpoint.gguf.families.gemma3 import GEMMA3
from moebius_worker.checkpoint.gguf.families.gemma4 import GEMMA4
from moebius_worker.checkpoint.gguf.families.glm import GLM4_MOE, MINIMAX_M2
from moebius_worker.checkpoint.gguf.families.gpt_oss import GPT_OSS
from moebius_worker.checkpoint.gguf.families.llama import LLAMA, MINISTRAL3, MISTRAL, MIXTRAL
from moebius_worker.checkpoint.gguf.families.qwen import OLMOE, QWEN2, QWEN3, QWEN3_MOE
from moebius_worker.checkpoint.gguf.families.qwen35 import QWEN3_NEXT, QWEN35, QWEN35_MOE
from moebius_worker.checkpoint.gguf.family import Family
from moebius_worker.checkpoint.gguf.file import Gguf
from moebius_worker.checkpoint.gguf.keys import Keys

FAMILIES = (
    *(LLAMA, MIXTRAL, MISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN3_MOE, QWEN35, QWEN35_MOE, QWEN3_NEXT),
    *(GEMMA3, GEMMA4, GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE, MINIMAX_M2, OLMOE),
)


def find_family(gguf: Gguf) -> Family:
    """The table of a file's architecture. Raises CheckpointError for one that there is none of."""
    keys, architecture = Keys(gguf), gguf.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.architecture == architecture and family.applies(keys):
            return family
    names = ", ".join(sorted({family.architecture for family in FAMILIES}))
    raise CheckpointError(
        f"{gguf.path}: the GGUF architecture {architecture!r} is not supported. Supported are {names}."
    )
