"""gpt-oss: messages in channels, calls as messages to a recipient.

The prompt ends behind `<|start|>assistant`, so the recipient of the first message may come without a marker.
"""

from moebius_gateway.text.parsing.spec import Channel, JsonArguments, NamedCall, ParserSpec, Region, Rule

# The first is what the models are trained to write.
TYPES = ("<|constrain|>json", "{word}", "<|constrain|>{word}")
CALL = NamedCall(
    tuple(
        f"{channel} to=functions.{{name}} {type}<|message|>"
        for channel in ("commentary", "analysis")
        for type in TYPES
    ),
    JsonArguments(),
    ends=("<|call|>", "<|end|>"),
)
# The recipient as the templates write it in old messages: before the channel.
CALL_BY_ROLE = NamedCall(
    tuple(f" to=functions.{{name}}<|channel|>commentary {type}<|message|>" for type in TYPES),
    JsonArguments(),
    ends=CALL.ends,
)

HARMONY = ParserSpec(
    name="harmony",
    rules=(
        Rule(
            "<|channel|>",
            (
                CALL,
                Channel(
                    Region.REASONING, ("analysis<|message|>", "analysis{header}<|message|>"), ("<|end|>",)
                ),
                Channel(
                    Region.CONTENT,
                    ("final<|message|>", "{header}<|message|>", "{header}<|constrain|>{word}<|message|>"),
                    ("<|return|>", "<|end|>"),
                ),
            ),
        ),
        Rule(
            "<|start|>",
            (
                NamedCall(
                    tuple(f"assistant{head}" for head in CALL_BY_ROLE.heads), JsonArguments(), CALL.ends
                ),
                Channel(Region.CONTENT, ("assistant",)),
            ),
        ),
    ),
    start=(CALL_BY_ROLE,),
    dropped=("<|end|>", "<|return|>", "<|call|>"),
    signs=(("<|channel|>", "<|message|>"),),
    tokens=("<|channel|>", "<|message|>"),
    model_types=("gpt_oss",),
)
