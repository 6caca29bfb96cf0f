"""Frames that a broken peer may send: garbled bytes, and messages with anything in their fields."""

import random
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (0, 1, 2, 5, 7, 2**31 - 1, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "\0", "🙂" * 50)
KINDS = FieldDescriptor


def garbled(draw: random.Random, frame: bytes) -> bytes:
    """Random bytes, or a frame that was cut off, overwritten or repeated in part."""
    data = bytearray(frame)
    match draw.randrange(4):
        case 0:
            return draw.randbytes(draw.randrange(1, 200))
        case 1:
            return bytes(data[: draw.randrange(len(data))])
        case 2:
            for _ in range(draw.randrange(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            return bytes(data)
        case _:
            at = draw.randrange(len(data))
            return bytes(data[:at] + data[draw.randrange(len(data)) :] + data[:at])


def filled(draw: random.Random, message: Message, depth: int = 4) -> Message:
    """The message with some of its fields set to anything that the wire can carry."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4 or (depth == 0 and field.type == KINDS.TYPE_MESSAGE):
            continue
        if field.type == KINDS.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[draw.choice(INTEGERS)] = draw.choice(FLOATS)
        elif field.type == KINDS.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(draw.randrange(3)):
                    filled(draw, inner.add(), depth - 1)
            else:
                filled(draw, inner, depth - 1)
                inner.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(draw, field) for _ in range(draw.randrange(4)))
        else:
            setattr(message, field.name, _value(draw, field))
    return message


def _value(draw: random.Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case KINDS.CPPTYPE_STRING:
            text = draw.choice(TEXTS)
            return text.encode() if field.type == KINDS.TYPE_BYTES else text
        case KINDS.CPPTYPE_FLOAT | KINDS.CPPTYPE_DOUBLE:
            return draw.choice(FLOATS)
        case KINDS.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case KINDS.CPPTYPE_ENUM:
            return draw.choice((0, 1, 2, 3, 99))
        case KINDS.CPPTYPE_INT32 | KINDS.CPPTYPE_INT64:
            return draw.choice((*INTEGERS[:-1], -1))
    return draw.choice(INTEGERS)


def garbage(seed: int, count: int, example: Message) -> Iterator[bytes]:
    """`count` frames: garbled ones, and such that are whole but make no sense."""
    draw = random.Random(seed)
    for number in range(count):
        if number % 2:
            yield filled(draw, type(example)()).SerializeToString()
        else:
            yield garbled(draw, example.SerializeToString())
