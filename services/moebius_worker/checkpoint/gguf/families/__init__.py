"""The model families whose GGUF files can be read, a table each."""

from moebius_worker.checkpoint.errors import CheckpointError

from ..family import Family
from ..file import Gguf
from ..keys import Keys
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .gemma3 import GEMMA3
from .gemma4 import GEMMA4
from .glm import GLM4_MOE, MINIMAX_M2
from .gpt_oss import GPT_OSS
from .llama import LLAMA, MINISTRAL3, MISTRAL, MIXTRAL
from .qwen import OLMOE, QWEN2, QWEN3, QWEN3_MOE
from .qwen35 import QWEN3_NEXT, QWEN35, QWEN35_MOE

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
